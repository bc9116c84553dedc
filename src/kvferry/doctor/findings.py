"""All that `kvferry doctor` can find: one table for the command, its JSON and the docs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, StrEnum
from typing import NamedTuple

from kvferry.errors import FaultKind
from kvferry.store.faults import reason_of


class Severity(StrEnum):
    ERROR = "error"
    """KV is not stored or not found, or the engine does not start."""
    WARNING = "warning"
    """It works, but not for long, or not as well as it could."""


class Finding(NamedTuple):
    """Something that is wrong.

    Attributes:
        where: a store, "vllm", "config" or "machine".
        text: what is wrong. May quote text from outside.
        todo: what to do about it.
    """

    where: str
    problem: Problem
    text: str
    todo: str


_E, _W = Severity.ERROR, Severity.WARNING
_EVICT = "set maxmemory to what the server may take, and maxmemory-policy allkeys-lru"


class Problem(Enum):
    """A row of the table. Its check fills in the names in braces.

    Attributes:
        severity, text, todo: as in `Finding`.
    """

    # fmt: off
    # One row for each `FaultKind`, by its name: what a store said.
    AWAY = (_E, "it does not answer: {said}",
            "start the server or mount; check host, port, firewall; engines go on without it "
            "meanwhile")
    LATE = (_E, "it gave no answer in time: {said}",
            "look whether it hangs, is overloaded or behind a firewall; a port in clear does not "
            "answer TLS: valkey:// or http:// there; engines go on without it meanwhile")
    PROTOCOL = (_E, "it does not speak this protocol: {said}",
                "TLS needs valkeys:// or https://, a port in clear valkey:// or http://; check "
                "ca_file; of peers, run one release")
    CLUSTER = (_E, "it is a cluster that is not asked as one, or the reverse: {said}",
               "write ?cluster=true for a cluster and only for one; start all of its nodes")
    LOGIN = (_E, "it refuses the login: {said}",
             "give the server's user and password or key, and check that they are not outdated")
    RIGHTS = (_E, "its user may not do this: {said}",
              "allow this user to read, write and delete there; users of one group share a "
              "directory with ?mode=0770")
    READ_ONLY = (_E, "it is read-only: {said}",
                 "name the primary, not a replica; mount it writable; leave the option read_only "
                 "out")
    REFUSED = (_E, "it answers and fails: {said}",
               "check the disk, or the server and its log")
    FULL = (_E, "it has no room for a record of 2 MiB, and evicts nothing for it",
            "raise its limit, or have it evict (Valkey: maxmemory-policy allkeys-lru)")
    INDEXING = (_W, "it takes no values yet: {said}", "nothing: ask again when its index is filled")
    UNLISTED = (_W, "its records cannot be looked through: {said}",
                "nothing for engines; commands need the right to list, and of Mooncake ?admin=...")
    UNUSABLE = (_E, "it cannot be used: {said}",
                "correct the URL, or let an engine make the store first")
    CLOSED = (_E, "it was closed meanwhile: {said}",
              "ask again; a process that forks opens its stores afterwards")
    BUG = (_E, "a bug, so what else it would show is not known: {said}",
           "report it to the authors of kvferry, or of the store's client if its class is named")
    # What a check of a store finds.
    EVICTS_AT_ONCE = (_E, "a record that was just stored is gone: the server evicts at once",
                      "give it more memory, or its own server")
    NOT_FOUND = (_E, "a record that was just stored can be read, but look-ups do not find it",
                 "check the server's replicas; of a store of your own, its client's exists")
    NOT_DELETED = (_W, "a record of this check could not be deleted",
                   "check the right to delete: damaged records could not be taken out either")
    # It will not serve for long.
    NO_MAXMEMORY = (_W, "it has no maxmemory: it grows until its machine's memory is full", _EVICT)
    EVICTS_NOTHING = (_W, "its maxmemory-policy evicts no records, as none expires: once full, it "
                      "refuses all", _EVICT)
    NO_QUOTA = (_W, "the engine that used it last has no quota: it grows until the disk ({free} "
                "free) is full",
                "add ?max_bytes=200GiB or what the disk can spare")
    QUOTA_ABOVE_DISK = (_W, "its quota ({quota}) does not fit: {used} are used, and the disk has "
                        "{free} free", "set max_bytes to at most {most}, or make room")
    QUOTA_BELOW_PROMPT = (_W, "its quota holds {fits} tokens of this model, less than one prompt "
                          "of {longest}", "raise max_bytes to at least {needed}")
    FEW_FILES = (_W, "its file system has room for {free} more files",
                 "remove small files, or make a file system with more inodes")
    UNTRUSTED = (_W, "the directory {why}: others can change it",
                 "chown it to this user, and chmod go-w; in a pod, let fsGroup be a group that no "
                 "other account of the image is in")
    CLOCK = (_W, "its clock differs from that of this machine by {skew} s, so ages are wrong",
             "synchronise both (chrony, systemd-timesyncd)")
    # What it holds.
    QUARANTINE = (_W, "{num} damaged records are in quarantine",
                  "check the disk; `kvferry ls --removed` says when and why")
    DAMAGED = (_W, "{num} of {of} records that were looked at are damaged: {why}",
               "check the disk or server; `kvferry verify` takes damaged records out")
    SHARDS = (_W, "{num} of {of} records that were looked at are shards of engines whose ranks "
              "are on several machines: engines with another split do not read them",
              "nothing, if no engine has another; `kvferry copy --join` makes whole records of "
              "them")
    VANISHED = (_W, "files of records were removed in the last day, and not by kvferry",
                "nothing, if it was you; else keep other programs out: the quota makes room")
    DESCRIPTION = (_W, "the description of namespace {namespace} is damaged, or of another",
                   "start an engine of this model, which writes it again")
    NOT_SHARED = (_W, "namespaces {one} and {other} are of one model and do not share: {fields}",
                  "use the same options in both; `kvferry rm --namespace` deletes old records")
    OTHER_BLOCKS = (_W, "namespaces {one} and {other} of one model with recurrent states do not "
                    "share: {fields} follow from the sizes of their engines' blocks",
                    "start all of its engines with one --block-size, whatever their number of "
                    "ranks: `kvferry doctor --model DIR --vllm` says which")
    OTHER_MODEL = (_W, "nothing in it is of this model and configuration; the nearest namespace "
                   "differs in {fields}",
                   "check --model and the options, or the store of the engines that run it")
    OTHER_KERNELS = (_W, "{who} do not share: {fields} follows from the kernels of their hosts",
                     'no option sets that; "CPU hosts" and "Which models" in docs/vllm.md say '
                     "which hosts and dtypes share")
    # vLLM as it is installed, and its configuration.
    NO_VLLM = (_E, "vLLM is not installed in this environment",
               "run kvferry in the environment that runs vLLM")
    RELEASE = (_E, "this vLLM is not served: {said}", "install a release that is served")
    PLUGINS = (_E, "{variable} is set and does not name kvferry, so vLLM does not load it",
               "add kvferry to {variable}, or unset it")
    ENTRY_POINT = (_E, "vLLM does not find kvferry: its entry point is not installed",
                   'install it by pip, or add "kv_connector_module_path": "{module}"')
    CONFIG = (_E, "vLLM or kvferry would refuse it: {said}",
              'correct it; needed are "kv_connector": "KVFerryConnector" and "kv_role": "kv_both"; '
              "docs/vllm.md lists the options, and what is served")
    NO_PREFIX_CACHING = (_W, "prefix caching is off: each hit is loaded again, also where vLLM has "
                         "just had it, and requests with images may not be cached",
                         "leave enable_prefix_caching out, or set it to true")
    # The machine.
    IN_PYTHON = (_W, "checksums are computed in Python: hashing and verifying hold its lock, so "
                 "steps of the engine wait for them",
                 "install a C compiler, then kvferry again, or install a wheel built with one")
    POOL_ABOVE_MEMORY = (_E, "the host pool ({pool}) takes more than half of the memory here "
                         "({here}): the kernel may kill the engine",
                         "lower memory_bytes, or give the machine or container more memory")
    POOL_BELOW_RECORDS = (_E, "the host pool ({pool}) is smaller than two records of this model, "
                          "so the engine does not start", "set memory_bytes to at least {needed}")
    POOL_BELOW_STEPS = (_E, "the host pool ({pool}) is smaller than the KV of two steps of "
                        "{step} tokens, so chunks are not stored",
                        "set memory_bytes to at least {needed}, or lower max_num_batched_tokens")
    # fmt: on

    def __init__(self, severity: Severity, text: str, todo: str) -> None:
        self.severity, self.text, self.todo = severity, text, todo

    @classmethod
    def of(cls, kind: FaultKind) -> Problem:
        """The row of what a store said."""
        return cls[kind.name]

    @property
    def code(self) -> str:
        return self.name.lower().replace("_", "-")

    def at(self, where: str, **values: object) -> Finding:
        """Return this problem of `where`, its braces filled in."""
        return Finding(where, self, self.text.format(**values), self.todo.format(**values))


def checked(
    where: str, check: Callable[[], Iterable[Finding]], step: Callable[[], str] = lambda: "it"
) -> list[Finding]:
    """Return what a check finds. A check that fails with an unexpected error is a finding, too:
    without its answer, `doctor` cannot say that nothing is wrong. `step` names what failed."""
    try:
        return list(check())
    except Exception as error:
        return [Problem.BUG.at(where, said=f"{step()} failed: {reason_of(error)}")]
