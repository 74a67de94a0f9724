"""The frameworks' callbacks: with stand-ins for their wiring, and with the frameworks where installed."""

from __future__ import annotations

import importlib
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cotenant import progress
from cotenant.integrations.reporting import Reporter

Line = tuple[int | None, float | None, str]


class Heard:
    """Replaces `progress.step`, with a clock that is moved explicitly."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[Line] = []

    def __call__(self, n: int | None = None, *, loss: float | None = None, phase: str = "") -> None:
        self.lines.append((n, loss, phase))

    def reporter(self) -> Reporter:
        return Reporter(self, lambda: self.now)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Import one of our modules with a stand-in for its framework."""
    ours: list[str] = []

    def load(name: str, framework: str, attribute: str = "", **content: Any) -> Any:
        module: Any = ModuleType(framework)
        vars(module).update({attribute: SimpleNamespace(**content)} if attribute else content)
        monkeypatch.setitem(sys.modules, framework, module)
        sys.modules.pop(f"cotenant.integrations.{name}", None)
        ours.append(f"cotenant.integrations.{name}")
        return importlib.import_module(f"cotenant.integrations.{name}").ProgressCallback

    yield load
    for name in ours:
        sys.modules.pop(name, None)


class Base:
    """What the frameworks' callbacks share."""

    params: Any = None


def test_steps_are_reported_ten_times_a_second_and_losses_once(heard: Heard) -> None:
    reporter = heard.reporter()
    for number in range(1, 301):
        heard.now = number / 100
        reporter.step(number, loss=number)
    reporter.flush()
    assert len(heard.lines) <= 32
    assert heard.lines[-1][0] == 300, "the last step is always told"
    assert [loss for _, loss, _ in heard.lines if loss is not None] == pytest.approx([1, 101, 201], abs=12)


def test_each_phase_counts_its_steps_and_reports_its_last_at_a_change(heard: Heard) -> None:
    reporter = heard.reporter()
    reporter.step(7)
    reporter.step(8)
    for _ in range(3):
        reporter.step(phase="validation")
    heard.now = 1.0
    reporter.step(9)
    reporter.step(phase="validation")
    reporter.flush()
    assert [(n, phase) for n, _, phase in heard.lines] == [
        (7, ""),
        (8, ""),
        (3, "validation"),
        (9, ""),
        (4, "validation"),
    ]


def test_the_lightning_callback_reports_batches(heard: Heard, stand_in: Callable[..., Any]) -> None:
    callback = stand_in("lightning", "lightning.pytorch", Callback=Base)(heard.reporter())
    trainer = SimpleNamespace(global_step=0, sanity_checking=True)
    callback.on_validation_batch_end(trainer, None, None, None, 0)
    trainer.sanity_checking = False
    assert heard.lines == []
    for number in (1, 2):
        heard.now, trainer.global_step = float(number), number
        callback.on_train_batch_end(trainer, None, {"loss": 0.5 / number}, None, number - 1)
    callback.on_validation_batch_end(trainer, None, None, None, 0)
    callback.on_validation_end(trainer, None)
    callback.on_train_end(trainer, None)
    assert heard.lines == [(1, 0.5, ""), (2, 0.25, ""), (1, None, "validation")]


def test_the_other_lightning_package_is_used_if_imported(stand_in: Callable[..., Any]) -> None:
    sys.modules.pop("lightning.pytorch", None)

    class Other(Base):
        pass

    assert issubclass(stand_in("lightning", "pytorch_lightning", Callback=Other), Other)


def test_keras_batches_are_counted_over_epochs(heard: Heard, stand_in: Callable[..., Any]) -> None:
    made = stand_in("keras", "keras", "callbacks", Callback=Base)
    assert made.async_safe
    callback = made(heard.reporter())
    callback.params = {"steps": 10}
    for epoch in (5, 6):
        callback.on_epoch_begin(epoch)
        for batch in range(10):
            heard.now += 1
            callback.on_train_batch_end(batch, {"loss": 0.5})
        callback.on_test_batch_end(0)
        callback.on_test_end()
    callback.on_train_end()
    training = [n for n, _, phase in heard.lines if not phase]
    assert training == list(range(51, 71)), "a training that was resumed goes on from its epoch"
    assert [n for n, _, phase in heard.lines if phase] == [1, 2]


def test_a_trainers_logs_give_the_loss(heard: Heard, stand_in: Callable[..., Any]) -> None:
    callback = stand_in("huggingface", "transformers", TrainerCallback=Base)(heard.reporter())
    state = SimpleNamespace(global_step=0)
    for number in range(1, 21):
        heard.now, state.global_step = number / 1000, number
        assert callback.on_step_end(None, state, None, model=None) is None
        if number % 10 == 0:
            callback.on_log(None, state, None, logs={"loss": 1 / number, "epoch": 1.0})
    callback.on_log(None, state, None, logs={"eval_loss": 3.0})
    callback.on_prediction_step(None, state, None)
    callback.on_evaluate(None, state, None)
    assert heard.lines == [(1, None, ""), (10, 0.1, ""), (20, 0.05, ""), (1, None, "validation")]


def test_whatever_goes_wrong_is_warned_of_once(stand_in: Callable[..., Any]) -> None:
    def broken(n: int | None = None, *, loss: float | None = None, phase: str = "") -> None:
        raise RuntimeError("no way")

    callback = stand_in("huggingface", "transformers", TrainerCallback=Base)(Reporter(broken))
    with warnings.catch_warnings(record=True) as told:
        callback.on_step_end(None, SimpleNamespace(global_step=1), None)
        callback.on_step_end(None, object(), None)
    assert [str(one.message) for one in told] == ["progress is not reported to Cotenant: RuntimeError: no way"]
    callback = stand_in("huggingface", "transformers", TrainerCallback=Base)(Reporter(broken))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback.on_step_end(None, object(), None)


def test_outside_of_cotenant_nothing_is_read(stand_in: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    callback = stand_in("lightning", "lightning.pytorch", Callback=Base)()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback.on_train_batch_end(object(), None, None, None, 0)  # an object without `global_step`
    assert callback.reporter.off


def test_a_reporter_goes_with_its_callback_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(Reporter())).off == Reporter().off


def test_a_real_lightning_trainer_calls_these_hooks(heard: Heard) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    torch = pytest.importorskip("torch")
    from cotenant.integrations.lightning import ProgressCallback

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]  # not installed where types are checked
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            heard.now += 1
            return self.layer(batch).pow(2).mean()

        def validation_step(self, batch: Any, index: int) -> None:
            self.layer(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    batches = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=4)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_epochs=1, callbacks=[ProgressCallback(heard.reporter())], **options)
    trainer.fit(Model(), batches, batches)
    assert [n for n, _, phase in heard.lines if not phase] == list(range(1, 9))
    assert heard.lines[-1] == (8, None, "validation")


def test_a_real_keras_model_calls_these_hooks(heard: Heard) -> None:
    keras = pytest.importorskip("keras")
    numpy = pytest.importorskip("numpy")
    from cotenant.integrations.keras import ProgressCallback

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    inputs = numpy.ones((64, 4), dtype="float32")
    callback = ProgressCallback(heard.reporter())
    model.fit(inputs, inputs[:, :1], batch_size=8, epochs=2, validation_split=0.5, callbacks=[callback], verbose=0)
    assert heard.lines[0][0] is not None
    assert heard.lines[0][1] is not None
    assert heard.lines[-1][2] == "validation"
    assert max(n or 0 for n, _, phase in heard.lines if not phase) == 8


def test_a_real_trainer_calls_these_hooks(heard: Heard, tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    pytest.importorskip("accelerate")
    from cotenant.integrations.huggingface import ProgressCallback

    class Model(torch.nn.Module):  # type: ignore[misc, name-defined]  # not installed where types are checked
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: Any = None, labels: Any = None) -> Any:
            out = self.layer(x)
            return {"loss": (out - labels).pow(2).mean(), "logits": out}

    data = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(64)]
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        num_train_epochs=1,
        per_device_train_batch_size=8,
        logging_steps=4,
        eval_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
    )
    callback = ProgressCallback(heard.reporter())
    trainer = transformers.Trainer(
        model=Model(), args=arguments, train_dataset=data, eval_dataset=data, callbacks=[callback]
    )
    trainer.train()
    assert [n for n, loss, phase in heard.lines if loss is not None] == [4, 8]
    assert heard.lines[-1][2] == "validation"
