"""Compares the code that reads outside input with the fuzzed targets.

A reader calls a parser, or opens a file, a database or a socket. Each reader must be reached by the valid inputs of a
target, or be listed here: with the target that runs a whole server, or with the reason why its input is trusted.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.verification.fuzz.runner import clear_caches

import cotenant

ROOT = Path(cotenant.__file__).parents[2]
ROOMS = ("src/cotenant", "services", "policies", "node_agent")
METHODS = frozenset(  # methods of any object
    {
        *(
            "ParseFromString",
            "FromString",
            "read_bytes",
            "read_text",
            "recv",
            "recvmsg",
            "recvfrom",
            "get_unverified_header",
        ),
        *(
            "load_pem_x509_certificates",
            "load_pem_private_key",
            "compose_all",
            "decompress",
            "decompressobj",
            "urlopen",
        ),
        *("ParquetFile", "iter_batches"),
    }
)
OF_MODULES = frozenset(
    {
        *("json.load", "json.loads", "tomllib.load", "tomllib.loads", "sqlite3.connect", "gzip.open", "csv.reader"),
        *(
            "csv.DictReader",
            "yaml.SafeLoader",
            "yaml.compose_all",
            "pickle.load",
            "pickle.loads",
            "struct.unpack",
            "os.read",
        ),
        *("struct.unpack_from", "jwt.decode", "np.load", "socket.socket"),
    }
)
OURS = "our own file, part of the package"
KERNEL = "written only by the kernel"
BY_SERVERS = {  # reached only by a whole server: the target that runs one
    "src/cotenant/security/audit.py": "unary calls",
    "services/queue/api/follower_reads.py": "unary calls",
    "services/queue/estimates/job_estimates.py": "call sequences",
    "node_agent/control/progress_reader.py": "agent sockets",
    "node_agent/control/output_patterns.py": "agent sockets",
    "node_agent/control/pattern_process.py": "agent sockets",
    "node_agent/runtime/process_runtime.py": "agent sockets",
    "node_agent/supervisor/loop.py": "agent sockets",
    "node_agent/supervisor/supervisor.py": "agent sockets",
    "node_agent/supervisor/task_process.py": "agent sockets",
    "node_agent/supervisor/zygote.py": "agent sockets",
}
UNPARSED = "copies the bytes, or writes its own"
OF_OUR_CHILD = "written only by our own process"
OF_ITS_USER = "runs in a job, and reads only what processes of the job's user write"
OF_DEV_NULL = "opens only /dev/null"
OF_CALLER = "a pickle from the caller's own job, which runs as the caller"
EXCUSED = {
    "services/predictor/api/advice.py:AdviceServicer._ask": OF_OUR_CHILD,
    "src/cotenant/simulator/plan_process.py:main": "its first line is written only by the predictor, which started it",
    "src/cotenant/executor_check/laws.py:Script.starts": "written by the check's own jobs",
    "src/cotenant/executor_check/laws.py:alive": "the kernel writes it",
    "src/cotenant/cli/jobs/folder_choice.py:_boot_id": "the kernel writes it",
    "src/cotenant/executor_check/laws.py:leftovers": "written by the check's own jobs",
    "src/cotenant/executor_check/transcript.py:_end": UNPARSED,
    "services/slurm/acting.py:_loaded": "reads the file; what it calls is a target",
    "services/slurm/acting.py:_loaded_lists": "reads the file; what it calls is a target",
    "node_agent/slurm/step_groups.py:environment": "reads the file; what it calls is a target",
    "node_agent/slurm/sidecar.py:_guard": OF_OUR_CHILD,
    "services/slurm/output_progress.py:last_lines": "reads the file; what it calls is a target",
    "services/slurm/commands.py:_UnixConnection.connect": "connects; the reader of answers is a target",
    "services/queue/folders/folder_store.py:_TenantFolders._put": UNPARSED,
    "src/cotenant/cli/mesh/demo_programs/gang.py:exchange": "the demo's own replicas talk to each other",
    "src/cotenant/fail_points.py:_Directory.on_reach": "only tests arm fail points",
    "src/cotenant/cli/mesh/http_process.py:bind": "binds a port, receives nothing",
    "src/cotenant/simulator/report/components.py:parts": "its script is part of this package",
    "src/cotenant/web/__main__.py:main": "its argument is written only by `up` and `serve`",
    "src/cotenant/web/__main__.py:_serve": "takes over a listening socket; uvicorn reads from it",
    "src/cotenant/web/http_server.py:_end_with_parent.<locals>.read": "detects the end of its input, ignores the rest",
    "src/cotenant/gateway/__main__.py:main": "its argument is written only by `up` and `serve`",
    "src/cotenant/gateway/__main__.py:_serve": "takes over a listening socket; uvicorn reads from it",
    "src/cotenant/transcoding/shipped_protos.py:descriptors": OURS,
    "src/cotenant/transcoding/answer_json.py:answer_json": "reads only answers of the mesh",
    "src/cotenant/web/lab_process.py:main": "its request is written only by the dashboard, which started it",
    "src/cotenant/cli/mesh/readiness.py:notify_ready": "sends, receives nothing",
    "src/cotenant/file_descriptors.py:Spare.refill": OF_DEV_NULL,
    "src/cotenant/rpc/connections.py:Connections.run": OF_DEV_NULL,
    "src/cotenant/rpc/connections.py:Connections._close": "shuts a socket down, receives nothing",
    "src/cotenant/rpc/connections.py:accepted_peer": "asks the kernel for the addresses of a socket",
    "node_agent/__main__.py:_on_stdin": "detects the end of its input, ignores the rest",
    "node_agent/containers/images.py:ImageStore._read": OF_OUR_CHILD,
    "node_agent/containers/images.py:ImageStore.shrink": OF_OUR_CHILD,
    "node_agent/containers/images.py:_read_answer": OF_OUR_CHILD,
    "node_agent/containers/unpack.py:Layout.open": "opens what the targets of images read",
    "node_agent/containers/unpack.py:main": "asked only by the agent",
    "node_agent/runtime/launch.py:recorded_image": OF_OUR_CHILD,
    "node_agent/supervisor/container.py:ContainerTask._become_program": "opens /dev/null",
    "node_agent/supervisor/container.py:ContainerLauncher._open_image": "opens a directory, reads nothing from it",
    "node_agent/supervisor/container.py:ContainerLauncher.launch": OF_OUR_CHILD,
    "node_agent/supervisor/container.py:ContainerNamespaces.__init__": KERNEL,
    "node_agent/supervisor/container.py:_first_line": OF_OUR_CHILD,
    "node_agent/supervisor/isolation.py:_make_cgroups_read_only": KERNEL,
    "node_agent/supervisor/rootless.py:RootlessLauncher.enter": "opens a directory, reads nothing from it",
    "node_agent/supervisor/rootless.py:RootlessTask._become_program": OF_DEV_NULL,
    "node_agent/slurm/sidecar.py:_lock": "opens a directory, reads nothing from it",
    "node_agent/supervisor/isolation.py:join_namespaces": KERNEL,
    "node_agent/supervisor/isolation.py:open_namespaces": OF_OUR_CHILD,
    "node_agent/supervisor/isolation.py:check_inside": OF_OUR_CHILD,
    "node_agent/control/session_endpoints.py:SocketEndpoint.connect": "connects, passes bytes on",
    "node_agent/runtime/session_process.py:SessionProcess._message": OF_OUR_CHILD,
    "node_agent/supervisor/session.py:Session.run": OF_OUR_CHILD,
    "node_agent/supervisor/session.py:Session._wait": OF_OUR_CHILD,
    "node_agent/supervisor/session.py:_read_all": OF_OUR_CHILD,
    "node_agent/supervisor/session.py:main": "asked only by the agent",
    "node_agent/runtime/run_as.py:min_person_uid": "written only by root",
    "src/cotenant/cli/research/plan.py:_document": UNPARSED,
    "src/cotenant/progress.py:_Reporter.flush": "sends, receives nothing",
    "src/cotenant/reproduction/cache.py:_digest_of_code": OURS,
    "src/cotenant/reproduction/live_mesh.py:Live._until": OF_OUR_CHILD,
    "src/cotenant/reproduction/papers/twins.py:_read_step_times": OF_OUR_CHILD,
    "src/cotenant/reproduction/papers/twins.py:_machine_lock": OURS,
    "src/cotenant/client/map_worker.py:Worker.__init__": OF_CALLER,
    "src/cotenant/client/map_worker.py:Worker._compute": OF_CALLER,
    "src/cotenant/client/map_worker.py:Worker._item": OF_CALLER,
    "src/cotenant/client/map_worker.py:Worker._pickled_error": OF_CALLER,
    "src/cotenant/client/map_worker.py:Worker._unfinished": OF_CALLER,
    "src/cotenant/client/map_worker.py:main": OF_CALLER,
    "src/cotenant/client/mapping.py:Map._read_results": OF_CALLER,
    "src/cotenant/client/mapping.py:Map._set": OF_CALLER,
    "src/cotenant/cli/jobs/submit.py:example_text": OURS,
    "src/cotenant/cli/mesh/new_policy.py:package": OURS,
    "src/cotenant/cli/mesh/slurm_acts.py:script": OURS,
    "src/cotenant/conformance/runtime_node.py:runs": "the kernel writes it",
    "src/cotenant/conformance/runtime_node.py:Node.output": "written by the laws' own programs",
    "src/cotenant/conformance/test_deciding_policies.py:test_a_policy_imports_no_clock_no_randomness_and_no_io": (
        "the source of an installed policy, which Python has imported"
    ),
    "src/cotenant/cli/mesh/notification_options.py:_Reader.secret": "takes any bytes as a key",
    "src/cotenant/cli/jobs/quick_submit.py:plain_spec": OURS,
    "src/cotenant/cli/jobs/secrets.py:_value": "takes any bytes as a value",
    "src/cotenant/cli/mesh/login.py:_token": "takes any text as a token",
    "node_agent/runtime/secret_files.py:memory_mounts": KERNEL,
    "src/cotenant/cli/slurm/install.py:_is_foreign": "searches bytes for bytes",
    "src/cotenant/simulator/traces/gavel.py:steps_per_second": OURS,
    "src/cotenant/simulator/traces/synergy.py:iteration_seconds": OURS,
    "services/queue/jobs/failure_classifier.py:_shipped": OURS,
    "src/cotenant/rpc/server.py:_bind_error": "binds a port, receives nothing",
    "src/cotenant/rpc/descriptors.py:DescriptorSource.read": "passes bytes on, reads nothing in them",
    "src/cotenant/cli/sessions/forward.py:listen": "binds a port, passes bytes on",
    "src/cotenant/cli/sessions/held_command.py:source": OURS,
    "src/cotenant/cli/sessions/holder.py:is_own": KERNEL,
    "src/cotenant/cli/sessions/holder.py:read": OF_ITS_USER,
    "src/cotenant/cli/sessions/holder.py:Holder.__init__": OF_ITS_USER,
    "src/cotenant/cli/sessions/holder.py:Client._size": KERNEL,
    "src/cotenant/cli/sessions/holder.py:_unread": KERNEL,
    "src/cotenant/cli/sessions/holder.py:attach": OF_ITS_USER,
    "src/cotenant/cli/sessions/notebook_server.py:free_port": "binds a port, receives nothing",
    "src/cotenant/cli/sessions/notebook_server.py:accepts": "connects, receives nothing",
    "src/cotenant/simulator/overlays/cpu_jobs.py:sample": OURS,
    "src/cotenant/simulator/physics/models.py:bundled": OURS,
    "node_agent/enforcement/bpf.py:attach_device_program": KERNEL,
    "node_agent/enforcement/bpf.py:_attached": KERNEL,
    "node_agent/control/gpu_owners.py:owner_of": "reads two environment variables; any error means no answer",
    "node_agent/probes/nvml_link.py:NvmlLink._read": OF_OUR_CHILD,
    "node_agent/probes/nvml_process.py:Nvml._numa_nodes": KERNEL,
    "node_agent/probes/nvml_process.py:serve": "queried only by the agent",
    "node_agent/runtime/supervisor_start.py:Zygote.fork": OF_OUR_CHILD,
    "node_agent/supervisor/command_line.py:CommandLine.__init__": KERNEL,
    "node_agent/supervisor/process_table.py:start_ticks": KERNEL,
    "node_agent/supervisor/process_table.py:children": KERNEL,
    "node_agent/supervisor/process_table.py:parent_of": KERNEL,
    "node_agent/runtime/orphan_processes.py:has_marker": "searches bytes for bytes",
    "node_agent/enforcement/project_quota.py:_opened": "opens a directory, reads nothing from it",
    "node_agent/enforcement/resctrl.py:Files.read": KERNEL,
    "node_agent/supervisor/state_file.py:sync_directory": "reads nothing",
    "node_agent/runtime/systemd_scope.py:_wait_for": KERNEL,
    "node_agent/probes/uncore.py:_counters_of": KERNEL,
    "node_agent/probes/uncore.py:parse_event": KERNEL,
    "node_agent/probes/uncore.py:_count": KERNEL,
}


def readers() -> Iterator[str]:
    """Yield every function that reads, as `path:qualified name`."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if "/v1/" in name or any(
                (ROOT / room / part).is_symlink() for part in path.relative_to(ROOT / room).parts[:1]
            ):
                continue
            yield from (f"{name}:{function}" for function in found_in(path.read_text()))


def found_in(code: str) -> Iterator[str]:
    """Yield the qualified names of a module's functions that read."""
    yield from dict.fromkeys(_of(ast.parse(code), "", []))


def _of(node: ast.AST, inside: str, nesting: list[str]) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = not isinstance(child, ast.ClassDef)
            name = ".".join([*nesting, child.name])
            yield from _of(
                child, name if function else inside, [*nesting, child.name, *(["<locals>"] if function else [])]
            )
        else:
            if isinstance(child, ast.Call) and _reads(child):
                yield inside or "<module>"
            yield from _of(child, inside, nesting)


def _reads(call: ast.Call) -> bool:
    match call.func:
        case ast.Name(id="open"):
            return not _writes(call, 1)
        case ast.Attribute(attr="open", value=ast.Name(id="os")):
            return any(isinstance(one, ast.Attribute) and one.attr == "O_RDONLY" for one in ast.walk(call))
        case ast.Attribute(attr="open", value=value):
            named = f"{value.id}.open" if isinstance(value, ast.Name) else ""
            return named in OF_MODULES or (_a_path(value) and not _writes(call, 0))
        case ast.Attribute(attr=attr, value=ast.Name(id=module)) if f"{module}.{attr}" in OF_MODULES:
            return True
        case ast.Attribute(attr=attr):
            return attr in METHODS
    return False


def _a_path(value: ast.expr) -> bool:
    """Return whether the opened object is named like a path."""
    name = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else "path"
    return "path" in name.lower() or name in ("SAMPLE", "PROFILE", "told", "__file__")


def _writes(call: ast.Call, place: int) -> bool:
    given = [one.value for one in call.keywords if one.arg == "mode"] or call.args[place : place + 1]
    return any(isinstance(one, ast.Constant) and str(one.value)[:1] in "wax" for one in given)


@contextmanager
def reaching(reached: set[str]) -> Iterator[None]:
    """Collect every function of ours that is called in the context, in this thread and in threads started there."""
    known: dict[CodeType, None] = {}
    clear_caches()  # otherwise cached input would not be read again

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            known[frame.f_code] = None

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
        for code in known:
            path = Path(code.co_filename).resolve()
            if path.is_relative_to(ROOT):
                name = code.co_qualname
                for end in (
                    ".<locals>.<genexpr>",
                    ".<locals>.<listcomp>",
                    ".<locals>.<dictcomp>",
                    ".<locals>.<lambda>",
                ):
                    name = name.removesuffix(end)
                reached.add(f"{path.relative_to(ROOT).as_posix()}:{name}")
