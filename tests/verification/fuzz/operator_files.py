"""Files of users and operators: jobs, tenants, settings, rules, clusters, measurements, access, tokens, backups."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from tests.verification.fuzz.targets import Prepared, Target, file_target

import cotenant.core.failures.rules as failure_rules
from cotenant.cli.flags import Flags
from cotenant.cli.jobs.job_fields import JOB_FIELDS, OTHER_NAMES, ROLE_FIELDS
from cotenant.cli.jobs.job_file import load_jobs
from cotenant.cli.jobs.submit import example_text
from cotenant.cli.jobs.user_defaults import read_user_defaults
from cotenant.cli.mesh.audit import _lines as audit_lines
from cotenant.cli.mesh.login import _authorities
from cotenant.cli.mesh.security_options import read_security_settings
from cotenant.cli.mesh.settings import Settings, merged, read_settings, sharing_rules, with_profile
from cotenant.cli.mesh.tenant_file import load_tenants
from cotenant.cli.outcome import CommandError
from cotenant.cli.research.predicting.measurements import load_measurements
from cotenant.cli.slurm import sbatch
from cotenant.cli.slurm.options import OPTIONS as SBATCH_OPTIONS
from cotenant.cli.slurm.outcome import SlurmError
from cotenant.codec.specs import spec_to_wire
from cotenant.core.failures.rules import BadRules
from cotenant.rpc.access import AccessError, find
from cotenant.security.certificates import Authority, BadCertificate
from cotenant.security.certificates import read as read_certificate
from cotenant.security.grpc_tls import BadTls, TlsFiles, load
from cotenant.security.secret_keys import BadKeys, SecretKeys
from cotenant.security.tokens import BadTokens, TokenFile
from cotenant.services.queue.jobs.failure_classifier import read_rules
from cotenant.simulator.clusters.cluster import BadCluster
from cotenant.simulator.clusters.cluster_argument import parse_cluster
from cotenant.store.backup_file import BadBackup, Contents, read_file, write_file

NOW = 1_800_000_000.0
JOBS = (
    example_text().encode(),
    b"gpus: 8\nmemory: 64GiB\ncpus: auto\nreplicas: 2\nenv: {A: yes}\nlabels: {a: b}\ncommand: [python3, train.py]\n",
    b"name: a\ngpus: 0.5\nqos: {rate: 2, latency: 1s, percentile: 99, arrivals: 10}\nkind: inference\n"
    b"replicas_min: 1\nreplicas_max: 4\ndeadline: 2030-01-31T18:00\ncommand: a\n---\ncommand: [b]\nafter_ok: [a]\n",
    b"roles:\n- {name: worker, replicas: 4, gpus: 1}\n- {name: ps, cpus: 2, command: [x]}\ngrace: 30s\nsignal: USR1\n"
    b"array: 1-10\ngoal: {loss: 0.1, fall: 0.01, steps: 3}\nprogress: {regex: 'step (\\d+)'}\ncommand: [a]\n",
)
BATCH_SCRIPTS = (
    b"#!/bin/bash -l\n#SBATCH --job-name='a b' -n 4 --mem=2G  # enough\n#SBATCH --array=0-9%2 -t 1-02:03:04\nsrun x\n",
    b"#!/bin/sh\n#SBATCH -N 2 --gres=gpu:a100:2,tmp:1 --begin=now+1hour --signal=B:USR1@60\n#SBATCH -d afterok:123_4\n",
    b"#!/bin/sh\n#SBATCH --gpus-per-task=1 --export=A=b,C --begin=2030-01-31T10:00 --qos=low --exclusive\ntrue\n",
)
TENANTS = (
    b"vision: {quota_gpus: 8, limit_gpus: 16, weight: 2}\nspeech: {quota_cores: 4, parent: vision}\n",
    b"- {id: vision, quota_gpus: 8, limit_cores: 16}\n- {id: b, parent: vision, weight: 1.5}\n",
)
SETTINGS = (
    b'listen = "127.0.0.1:0"\nnodes = 2\nshareable_gpus = true\nqueue = "las"\nsample_seconds = 2.5\n'
    b'preemption = "policy"\nreclaim = false\nreserve_after_seconds = inf\n[options.queue]\nmode = "strict"\n'
    b"[options.predictor.history]\nk = 3\n[limits]\ncalls_per_second = 5.0\nstreams = 3\n[tls]\nca = 'x'\n"
    b"clients = false\n[oidc]\nissuer = 'a'\n[audit]\nreads = true\n[users]\neve = 'root'\n",
    b'[[a.b]]\nc = [1, 2.5, 1979-05-27T07:32:00Z]\nd = {e = """\nx"""}\n',
)
RULES = (Path(failure_rules.__file__).with_name("rules.toml").read_bytes()[:6000],)
CLUSTERS = (
    b"6x8x48",
    b"nodes:\n- {count: 4, gpus: 8, cores: 96, memory: 512GiB, gpu_type: V100, rack: a}\n- {gpus: 0, cores: 8}\n",
    b'{"nodes": [{"count": 2, "gpus": 4, "cores": 16, "shareable": true}]}',
    b"sn,cpu_milli,memory_mib,gpu,model\nn1,64000,262144,2,P100\nn2,96000,1024,0,\n",
    b"num_switch,num_node_p_switch,num_gpu_p_node,num_cpu_p_node,mem_p_node\n2,4,4,32,128\n",
)
MEASUREMENTS = (
    b"cores,rate\n1,0.5\n2,0.9\n4,1.6\n",
    b"workers,servers,rate,model\n1,1,2.5,a\n2,1,4,b\n",
    b"step;loss\n0;9.5\n10;4.25\n# x\n20;2\n",
    b'batch\tseconds\n1\t0.01\n8\t"0.05"\n',
    b"gpus,nodes,rate,cores\n1,1,10,4\n8,2,70,4\n",
)
PEM = (b"-----BEGIN CERTIFICATE-----\nTUlJQg==\n-----END CERTIFICATE-----\n" * 2,)
SECRET_KEYS = (b'{"keys": [{"id": "20300101-0a", "key": "' + b"QUFB" * 10 + b'QUE="}]}',)
CONFIG = (b"endpoint = '127.0.0.1:1'\ntoken = 'a'\nstate_dir = '~/x'\n[tls]\nca = 'a'\ncert = 'b'\nkey = 'c'\n",)
USER_DEFAULTS = (b"notify = ['mailto:a@b.org']\nnotify_on = ['failed']\nbell = false\nendpoint = '127.0.0.1:1'\n",)
ENDPOINT = (b'{"queue": "a:1|b:2", "placement": "[::1]:2", "predictor": "a:3", "contention": "a:4"}',)
TOKENS = (
    json.dumps(
        {
            "tokens": [
                {
                    "id": "ab",
                    "role": role,
                    "name": "eve",
                    "tenants": "a,b" if role == "user" else "",
                    "sha256": "00",
                    "created": 1.5,
                    "expires": 0,
                }
                for role in ("user", "agent", "operator")
            ]
        }
    ).encode(),
)
AUDIT = (
    b'{"time": "2030-01-01T00:00:00", "who": "eve", "what": "CreateJob", "on": {"id": ["a"]}, "answer": "OK"}\n' * 2,
)


def targets() -> Iterator[Target]:
    """Yield the targets."""
    fields = [name.encode() for name in (*JOB_FIELDS, *ROLE_FIELDS, *OTHER_NAMES)]
    settings = [name.encode() for name in Settings.__dataclass_fields__]
    directives = [f"\n#SBATCH --{name}=".encode() for name in SBATCH_OPTIONS]
    wrong = (CommandError,)
    yield Target("jobs", file_target("job.yaml", _jobs, JOBS, fields), wrong)
    yield Target("batch scripts", file_target("job.sh", _batch_script, BATCH_SCRIPTS, directives), (SlurmError,))
    yield Target("tenants", file_target("t.yaml", load_tenants, TENANTS), wrong)
    yield Target("settings", file_target("c.toml", _settings, SETTINGS, settings), wrong)
    yield Target("failure rules", file_target("r.toml", lambda path: read_rules(str(path)), RULES), (BadRules,))
    yield Target("clusters", file_target("c.yaml", lambda path: parse_cluster(str(path)), CLUSTERS), (BadCluster,))
    yield Target("cluster option", _words, (BadCluster,))
    yield Target("measurements", file_target("m.csv", lambda path: load_measurements(str(path)), MEASUREMENTS), wrong)
    yield Target("client settings", file_target("cc.toml", _config, CONFIG), (AccessError,))
    yield Target("user defaults", file_target("cotenant/config.toml", _user_defaults, USER_DEFAULTS), wrong)
    yield Target("endpoint.json", file_target("endpoint.json", _state_dir, ENDPOINT), (AccessError,))
    yield Target("token", file_target("token", _state_dir, (b"abc-DEF_123\n",)), (AccessError,))
    yield Target(
        "secrets.key",
        file_target("secrets.key", _secret_keys, SECRET_KEYS),
        (BadKeys,),
    )
    yield Target("authorities of a login", file_target("ca.pem", lambda path: _authorities(str(path), ""), PEM), wrong)
    yield Target("tokens.json", file_target("tokens.json", lambda path: TokenFile(path).tokens(), TOKENS), (BadTokens,))
    yield Target("audit log", file_target("audit.jsonl", lambda path: list(audit_lines(path)), AUDIT), wrong)
    yield Target("certificates", _certificates, (BadTls, BadCertificate))
    yield Target("backups", _backups, (BadBackup,))


def _batch_script(path: Path) -> None:
    with redirect_stderr(StringIO()):
        sbatch.prepare({}, [str(path)])


def _jobs(path: Path) -> None:
    for draft in load_jobs(str(path), NOW):
        spec_to_wire(draft.spec).SerializeToString()


def _settings(path: Path) -> None:
    settings = with_profile(read_settings(path))
    sharing_rules(settings)
    merged(settings.options, {})
    read_security_settings(settings.sections, Flags(), insecure=False)


def _words(directory: Path) -> Prepared:
    seeds = (b"6x8x48", b"1x1", b"100x4x32", b"2x0x8")

    def run(data: bytes) -> None:
        parse_cluster(data.decode(errors="replace"))

    return Prepared(run, seeds)


def _secret_keys(path: Path) -> None:
    path.chmod(0o600)
    SecretKeys(path).current()


def _config(path: Path) -> None:
    find(None, {"XDG_STATE_HOME": str(path.parent)}, config=path)


def _user_defaults(path: Path) -> None:
    read_user_defaults({"XDG_CONFIG_HOME": str(path.parent.parent)})


def _state_dir(path: Path) -> None:
    endpoint = path.with_name("endpoint.json")
    if not endpoint.exists():
        endpoint.write_bytes(ENDPOINT[0])
    find(path.parent, {"XDG_STATE_HOME": str(path.parent)}, config=path.with_name("none"))


def _certificates(directory: Path) -> Prepared:
    authority = Authority(directory / "ca")
    authority.create("lab", 10)
    ca = authority.cert_path.read_bytes()

    def run(data: bytes) -> None:
        path = directory / "cert.pem"
        path.write_bytes(data)
        failed: Exception | None = None
        for read in (lambda: load(TlsFiles(path, path, path)), lambda: read_certificate(path)):
            try:
                read()
            except (BadTls, BadCertificate) as error:
                failed = error
        if failed:
            raise failed

    return Prepared(run, (ca, ca + (authority.cert_path.with_name("ca.key")).read_bytes()))


def _backups(directory: Path) -> Prepared:
    good = directory / "good"
    write_file(Contents(7, (("/a", b"1"), ("/b/c", b"\x00" * 30))), good)
    run = file_target("backup", read_file, ())(directory).run
    plain = gzip.decompress(good.read_bytes())

    def pack(data: bytes) -> bytes:
        """Update the digest of three of four inputs, so that not only the digest is tested."""
        lines = data.split(b"\n")
        try:
            pairs = [(one["k"], base64.b64decode(one["v"])) for one in map(json.loads, lines[1:-2])]
            digest = hashlib.sha256()
            for key, value in pairs:
                for part in (key.encode(), value):
                    digest.update(len(part).to_bytes(8, "big") + part)
            lines[-2] = json.dumps({"sha256": digest.hexdigest()}).encode()
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            pass
        packed = gzip.compress(b"\n".join(lines), 1)
        return packed if sum(data[:64]) % 4 else packed[: len(data) // 2] + data[:3] + packed[len(data) // 2 :]

    return Prepared(run, (plain,), pack=pack)
