"""The options of `sbatch` and `srun`, on the command line, in `#SBATCH` lines and in the environment."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from cotenant.cli.slurm.outcome import SlurmError

FLAG, VALUE, MAYBE = "flag", "value", "maybe"  # whether an option takes a value; a long option may have one after `=`
DIRECTIVE = "#SBATCH"
Given = dict[str, str]  # values by long name; "" for a flag


class Option(NamedTuple):
    """An option by its long name; `meaning` says what one that Cotenant does not follow would have meant."""

    short: str = ""
    takes: str = VALUE
    meaning: str = ""
    variable: str = ""  # in the environment, after SBATCH_; the long name unless given


def _told(meaning: str, short: str = "", takes: str = VALUE) -> Option:
    return Option(short, takes, meaning)


# fmt: off
OPTIONS: Mapping[str, Option] = {
    "account": Option("A"), "array": Option("a", variable="ARRAY_INX"), "begin": Option("b"), "chdir": Option("D"),
    "comment": Option(), "cpus-per-gpu": Option(), "cpus-per-task": Option("c"), "dependency": Option("d"),
    "error": Option("e"), "export": Option(), "gpus": Option("G"), "gpus-per-node": Option(), "gpus-per-task": Option(),
    "gres": Option(), "help": Option("h", FLAG), "hold": Option("H", FLAG), "job-name": Option("J"),
    "mem": Option(variable="MEM_PER_NODE"), "mem-per-cpu": Option(), "mem-per-gpu": Option(), "nodes": Option("N"),
    "ntasks": Option("n"), "ntasks-per-gpu": Option(), "ntasks-per-node": Option(), "no-requeue": Option("", FLAG),
    "open-mode": Option(), "output": Option("o"), "parsable": Option("", FLAG), "partition": Option("p"),
    "priority": Option(), "qos": Option("q"), "quiet": Option("Q", FLAG), "requeue": Option("", FLAG),
    "signal": Option(), "test-only": Option("", FLAG), "time": Option("t", variable="TIMELIMIT"),
    "usage": Option("", FLAG), "verbose": Option("v", FLAG), "version": Option("V", FLAG), "wait": Option("W", FLAG),
    "wrap": Option(), "get-user-env": Option("", MAYBE), "strict": Option("", FLAG),
    "kill-on-invalid-dep": Option(), "no-kill": Option("k", MAYBE), "unbuffered": Option("u", FLAG),
    "acctg-freq": _told("how often usage is sampled"),
    "bb": _told("a burst buffer"), "bbf": _told("a burst buffer"),
    "cluster-constraint": _told("clusters with these features"),
    "clusters": _told("other clusters", "M"),
    "constraint": _told("only nodes with these features", "C"),
    "container": _told("an OCI container"),
    "contiguous": _told("adjacent nodes", takes=FLAG),
    "core-spec": _told("cores reserved for the system", "S"),
    "cores-per-socket": _told("nodes with so many cores per socket"),
    "cpu-freq": _told("a frequency of the CPUs"),
    "cpu-bind": _told("how tasks are bound to CPUs"),
    "deadline": _told("to remove the job if it cannot end by then"),
    "delay-boot": _told("when nodes are rebooted"),
    "distribution": _told("how tasks are spread over nodes", "m"),
    "exclude": _told("not these nodes", "x"),
    "exclusive": _told("no other job on its nodes", takes=MAYBE),
    "export-file": _told("variables from a file"),
    "extra-node-info": _told("nodes with this layout of sockets", "B"),
    "gid": _told("another group"), "uid": _told("another user"),
    "gpu-bind": _told("how tasks are bound to GPUs"),
    "gpu-freq": _told("a frequency of the GPUs"),
    "gpus-per-socket": _told("GPUs for each socket"),
    "hint": _told("how the program uses cores"),
    "input": _told("a file as standard input", "i"),
    "licenses": _told("licenses", "L"),
    "mail-type": _told("mail about the job"), "mail-user": _told("who gets mail about the job"),
    "mem-bind": _told("how memory is bound"),
    "mincpus": _told("nodes with at least so many CPUs"),
    "mpi": _told("a kind of MPI"),
    "network": _told("a kind of network"),
    "nice": _told("another priority", takes=MAYBE),
    "nodefile": _told("only nodes of this file", "F"),
    "nodelist": _told("these nodes", "w"),
    "ntasks-per-core": _told("a maximum of tasks per core"),
    "ntasks-per-socket": _told("a maximum of tasks per socket"),
    "overcommit": _told("several tasks per core", "O", FLAG),
    "oversubscribe": _told("sharing cores with other jobs", "s", FLAG),
    "power": _told("power management"),
    "prefer": _told("rather nodes with these features"),
    "profile": _told("detailed profiles"),
    "propagate": _told("the resource limits of the shell", takes=MAYBE),
    "reboot": _told("nodes that are rebooted first", takes=FLAG),
    "reservation": _told("resources of a reservation"),
    "sockets-per-node": _told("nodes with so many sockets"),
    "spread-job": _told("as many nodes as possible", takes=FLAG),
    "switches": _told("a maximum of network switches"),
    "thread-spec": _told("threads reserved for the system"),
    "threads-per-core": _told("nodes with so many threads per core"),
    "time-min": _told("a shorter time limit if the job then starts earlier"),
    "tmp": _told("nodes with this much temporary disk"),
    "use-min-nodes": _told("as few nodes as possible", takes=FLAG),
    "wait-all-nodes": _told("when nodes count as ready"),
    "wckey": _told("a key for accounting"),
    "x11": _told("forwarding of X11", takes=MAYBE),
}
# fmt: on
_OF_SHORT = {option.short: name for name, option in OPTIONS.items() if option.short}
_VARIABLES = {f"SBATCH_{option.variable or name.upper().replace('-', '_')}": name for name, option in OPTIONS.items()}
_NOT_VARIABLES = frozenset({"SBATCH_HELP", "SBATCH_USAGE", "SBATCH_VERSION", "SBATCH_PARSABLE", "SBATCH_WRAP"})


class UnknownOption(SlurmError):
    """An option that Slurm does not have."""

    def __init__(self, command: str, name: str, why: str = "unrecognized option") -> None:
        super().__init__(f"{command}: {why} '{name}'", f'Try "{command} --help" for more information', prefixed=False)
        self.name = name


def read_arguments(command: str, words: Sequence[str]) -> tuple[Given, list[str]]:
    """Return the options at the beginning of a command line, and the words after them.

    Raises:
        UnknownOption: an option does not exist, or lacks its value.
    """
    given: Given = {}
    left = list(words)
    while left and left[0].startswith("-") and left[0] != "-":
        word = left.pop(0)
        if word == "--":
            break
        for name, value in _read(command, word, left):
            given[name] = value
    return given, left


def _read(command: str, word: str, left: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the options of a word; a value may be the next word, which is then taken from `left`."""
    if word.startswith("--"):
        name, assigned, value = word[2:].partition("=")
        name = _full_name(name.replace("_", "-"))
        if name not in OPTIONS:
            raise UnknownOption(command, word)
        takes = OPTIONS[name].takes
        if takes == FLAG and assigned:
            raise UnknownOption(command, word, "option doesn't allow an argument")
        yield name, value if assigned or takes != VALUE else _next(command, word, left)
        return
    letters = word[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        if letter not in _OF_SHORT:
            raise UnknownOption(command, letter, "invalid option --")
        name = _OF_SHORT[letter]
        if OPTIONS[name].takes == VALUE:
            yield name, letters.removeprefix("=") if letters else _next(command, letter, left)
            return
        yield name, ""


def _full_name(name: str) -> str:
    """Return the option that a name or an unambiguous beginning of it means."""
    if name in OPTIONS:
        return name
    found = [known for known in OPTIONS if len(name) > 1 and known.startswith(name)]
    return found[0] if len(found) == 1 else name


def _next(command: str, name: str, left: list[str]) -> str:
    if not left:
        raise UnknownOption(command, name, "option requires an argument --")
    return left.pop(0)


def read_directives(script: str) -> tuple[Given, list[str]]:
    """Return the options in a script's `#SBATCH` lines before its first command, and the unknown ones.

    >>> read_directives("#!/bin/sh\\n#SBATCH -J first --mem=2G  # enough\\n#SBATCH --fast\\ntrue\\n#SBATCH -n 3")
    ({'job-name': 'first', 'mem': '2G'}, ['--fast'])

    Raises:
        SlurmError: a line has an unclosed quote, or an option without its value.
    """
    given: Given = {}
    unknown: list[str] = []
    for line in script.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if not line.startswith(DIRECTIVE) or line[len(DIRECTIVE) :][:1].strip():
            continue
        try:
            left = shlex.split(line[len(DIRECTIVE) :], comments=True)
        except ValueError as error:
            raise SlurmError(f"Invalid directive {line!r}: {error}") from None
        while left:
            word = left.pop(0)
            try:
                given.update(_read("sbatch", word, left) if word.startswith("-") else _unexpected(word))
            except UnknownOption as error:
                if "requires" in error.lines[0]:
                    raise
                unknown.append(word)
    return given, unknown


def _unexpected(word: str) -> Iterator[tuple[str, str]]:
    raise UnknownOption("sbatch", word)


def read_environment(environment: Mapping[str, str]) -> Given:
    """Return the options that `SBATCH_` variables set.

    >>> read_environment({"SBATCH_TIMELIMIT": "5", "SBATCH_REQUEUE": "", "SBATCH_WRAP": "true"})
    {'time': '5', 'requeue': ''}
    """
    return {
        _VARIABLES[variable]: "" if OPTIONS[_VARIABLES[variable]].takes == FLAG else value
        for variable, value in environment.items()
        if variable in _VARIABLES and variable not in _NOT_VARIABLES
    }


EXCLUDING = (("requeue", "no-requeue"), ("mem", "mem-per-cpu", "mem-per-gpu"))


def merged(*sources: Given) -> Given:
    """Return the options of several sources, the last of which wins; one of exclusive options replaces the others.

    >>> merged({"mem": "1G", "time": "5"}, {"mem-per-cpu": "2G"})
    {'time': '5', 'mem-per-cpu': '2G'}
    """
    found: Given = {}
    for source in sources:
        for group in EXCLUDING:
            if not source.keys().isdisjoint(group):
                found = {name: value for name, value in found.items() if name not in group}
        found |= source
    return found
