"""Engines that read each other's host memory: at faults of any kind, every request ends right.

A simulated host checks each byte of a request's KV.
"""

from __future__ import annotations

import threading

import pytest

from kvferry import network
from kvferry.contract.handover import read_handover
from kvferry.contract.spec import Mode
from kvferry.store.kind import Opening
from kvferry.store.url import open_one, open_store
from kvferry.testing.faults import CorruptingStore, FailingStore, Gate, flip_bit
from kvferry.testing.stores.hooks import wait_until
from kvferry.types import DEFAULT_OPTIONS, RequestOptions
from tests.cache.deciding.test_handovers import WINDOWED
from tests.cache.hosts import make_groups
from tests.servers.certificates import make_authority, make_files
from tests.servers.places import num_said
from tests.servers.process import LOCALHOST, free_ports
from tests.transfer.lending import Raw

from .keeping import NUM_CHUNKS, PROMPT, HangsLater, assert_settles
from .keeping import open_store as open_directory

HIT = 40
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture
def peers(make_host, tmp_path):
    """Factory of hosts that serve and read, all with one key. `tls` is the end of a URL."""
    key_file = tmp_path / "peers.key"
    key_file.touch(0o600)
    key_file.write_bytes(b"k" * 32)
    made = []

    def make(port=0, reads=(), tiers=False, tls="", at=LOCALHOST, **options):
        options.setdefault("load_timeout_seconds", 30.0)
        if port is not None:
            options["serve"] = f"{LOCALHOST}:{port}?key_file={key_file}{tls}"
        if reads:
            hosts = ",".join(f"{at}:{each}" for each in reads)
            url = f"peer://{hosts}?key_file={key_file}{tls}"
            options["store"] = url if tiers else None
            namespace = made[0].scheduler.requests.namespace if made else b""
            if not tiers:
                options["store"] = open_one(url, Opening(namespace=namespace))
        host = make_host(**options)
        host.server = host.parts[0]._server
        made.append(host)
        return host

    yield make
    for host in made:
        host.parts[0].close()


def start_prefill(host, prompt=PROMPT, num_local_tokens=0, options=DEFAULT_OPTIONS):
    """The parameters of the answer of a prefill."""
    request = host.add("prefill", prompt, handover=read_handover(ASKED), options=options)
    host.admit(request, num_local_tokens=num_local_tokens)
    host.prefill(request)
    request.all_token_ids.append(7)
    return host.finish(request)


def prefill(host, *args, **more):
    """The same, with all chunks sealed then."""
    answer = start_prefill(host, *args, **more)
    assert_settles(host)
    return answer


def decode(host, answer, prompt=PROMPT, name="decode"):
    return host.run(name, prompt, handover=read_handover(answer)).num_external_tokens


def assert_waits(decoder, request):
    for _ in range(20):
        assert decoder.scheduler.lookup(request, 0).num_tokens is None
        decoder.step([])


def assert_ends(decoder, request, hit):
    assert decoder.admit(request) == hit
    decoder.complete(request)
    assert_settles(decoder)


def test_what_a_peer_stamped_is_fetched_with_the_first_step(peers):
    """A question before the fetch would cost a loaded engine a step."""
    prefiller = peers()
    answer = prefill(prefiller)
    decoder = peers(None, [answer["remote_port"]])
    request = decoder.add("decode", PROMPT, handover=read_handover(answer))
    assert decoder.scheduler.lookup(request, 0).num_tokens is None
    assert decoder.pool.num_taken == NUM_CHUNKS
    assert_ends(decoder, request, HIT)


def test_what_a_peer_stamped_and_does_not_have_yet_is_waited_for(peers):
    prefiller = peers()
    answer = start_prefill(prefiller)  # its last step has not ended
    decoder = peers(None, [answer["remote_port"]])
    decoder.scheduler.policy.saw_compute(10**6, 1.0)  # a fetch may take no longer than computing
    request = decoder.add("decode", PROMPT, handover=read_handover(answer))

    def was_read() -> bool:
        assert decoder.scheduler.lookup(request, 0).num_tokens is None
        decoder.step([])
        return decoder.observer["miss_absent"] == NUM_CHUNKS

    wait_until(was_read, "the peer says that it is about to have them")
    assert_waits(decoder, request)
    assert_settles(prefiller)
    assert_ends(decoder, request, HIT)


@pytest.mark.parametrize("warm", ["computed", "cached by the engine", "loaded"])
@pytest.mark.parametrize("groups", [None, WINDOWED], ids=["full", "window"])
def test_what_only_the_store_of_a_prefiller_has_is_in_its_memory_after_the_answer(
    peers, tmp_path, groups, warm
):
    """As of a prompt that comes again after a restart: peers do not see the store."""
    prefiller = peers(groups=groups, store=open_directory(tmp_path / "store"))
    prefill(prefiller)
    prefiller.forget_memory()
    local = 40 if warm == "cached by the engine" else 0
    loads = warm == "loaded"
    answer = prefill(prefiller, num_local_tokens=local, options=RequestOptions(load=loads))
    assert answer["kvferry"]["chunks"] == NUM_CHUNKS
    reader = peers(None, [answer["remote_port"]], groups=groups)
    assert decode(reader, answer) == HIT
    assert prefiller.observer["put_failed"] == prefiller.observer["save_failed"] == 0


@pytest.mark.parametrize("medium", ["peer", "directory"])
def test_reads_that_fail_for_ever_end(peers, tmp_path, medium):
    prefiller = peers(store=open_directory(tmp_path / "store"))
    answer = prefill(prefiller)
    inner = open_directory(tmp_path / "store")
    if medium == "peer":
        key_file = prefiller.parts[0].config.serve.partition("?")[2]
        url = f"peer://{LOCALHOST}:{answer['remote_port']}?{key_file}"
        inner = open_one(url, Opening(namespace=prefiller.scheduler.requests.namespace))
    store = FailingStore(inner, operations={"read"})
    decoder = peers(None, store=store)
    assert decode(decoder, answer) == 0
    assert store.num_failed <= NUM_CHUNKS + 3
    assert_settles(decoder)


def test_a_wrong_record_is_not_read_again(peers, tmp_path):
    answer = prefill(peers(store=open_directory(tmp_path / "store")))
    store = CorruptingStore(open_directory(tmp_path / "store"), damage=flip_bit(9000))
    decoder = peers(None, store=store)
    assert decode(decoder, answer) == 0
    assert decoder.observer["records_corrupt"] <= NUM_CHUNKS


# -- names of one address -------------------------------------------------------------------------


@pytest.fixture
def looked_up(monkeypatch):
    """The names that readers look up. Each is this machine."""
    names = []

    def look_up(host, _seconds):
        names.append(host)
        return [LOCALHOST]

    monkeypatch.setattr(network, "addresses_of", look_up)
    return names


@pytest.mark.parametrize(
    ("listed", "stamped"),
    [
        ("localhost", LOCALHOST),
        (LOCALHOST, "localhost"),
        (LOCALHOST, "LocalHost"),
        (LOCALHOST, "::1"),
        ("localhost", "0:0:0:0:0:0:0:1"),
        ("prefill-0.svc", LOCALHOST),
        ("prefill-0.svc", "Prefill-0.SVC."),
    ],
)
def test_an_address_in_another_spelling_is_the_same_peer(peers, looked_up, listed, stamped):
    answer = prefill(peers()) | {"remote_host": stamped}
    reads = [answer["remote_port"]]
    decoder = peers(None, reads, at=listed, tiers=True)
    decoder.run("before", [*range(900, 909)])
    wait_until(lambda: looked_up, "it connects, and so knows the addresses of the listed name")
    assert decoder.parts[0].store.learn([], (stamped, answer["remote_port"]))
    assert decode(decoder, answer) == HIT
    assert set(looked_up) == {listed}


@pytest.mark.parametrize("stamped", ["prefill-0.svc", "169.254.169.254", "10.0.0.1"])
def test_a_peer_that_is_not_listed_is_never_looked_up(peers, looked_up, stamped):
    answer = prefill(peers()) | {"remote_host": stamped}
    assert decode(peers(None, [answer["remote_port"]], tiers=True), answer) == HIT
    assert set(looked_up) == {LOCALHOST}


LONGER = [*PROMPT, *range(500, 506)]
"""47 tokens: five chunks of 8, a block of 4, and three tokens."""


def test_an_audit_compares_whole_chunks(peers):
    answer = prefill(peers(), LONGER)
    decoder = peers(None, [answer["remote_port"]], audit=1.0)
    assert decode(decoder, answer, LONGER) == 32
    assert_settles(decoder)
    assert decoder.observer["audits"] == 1


def test_a_promise_lasts_when_the_prompt_grows_before_it_is_admitted(peers):
    answer = prefill(peers(), LONGER)
    decoder = peers(None, [answer["remote_port"]])
    request = decoder.add("decode", LONGER, handover=read_handover(answer))
    while decoder.scheduler.lookup(request, 0).num_tokens is None:
        decoder.step([])
    request.all_token_ids.append(9)  # 48: a sixth whole chunk
    assert_ends(decoder, request, HIT)


@pytest.mark.parametrize(("block_size", "hit"), [(4, HIT), (16, 32)])
def test_a_decode_that_comes_before_its_prefill_waits_for_it(peers, block_size, hit):
    """Also where its first chunk alone is no block."""
    prefiller, groups = peers(), make_groups(block_size=block_size)
    decoder = peers(None, [prefiller.server.address[1]], groups=groups)
    request = decoder.add("decode", PROMPT, handover=read_handover({"do_remote_prefill": True}))

    def is_asked() -> bool:
        assert_waits(decoder, request)  # a look-up asks again if a stall cut the first connection
        return prefiller.server.num_connections > 0

    wait_until(is_asked, "the peer is asked")
    prefill(prefiller)
    assert_ends(decoder, request, hit)


def test_a_producer_takes_the_next_turn_from_the_consumer(peers):
    """By their roles, the one would load nothing and the other save nothing."""
    ports = free_ports(2)
    prefiller = peers(ports[0], ports[1:], mode=Mode.WRITE, tiers=True)
    decoder = peers(ports[1], ports[:1], mode=Mode.READ, save_generated=True, tiers=True)
    request = decoder.add("decode", PROMPT, handover=read_handover(prefill(prefiller)))
    assert decoder.admit(request) == HIT
    decoder.prefill(request)
    for token in range(100, 124):
        request.all_token_ids.append(token)
        decoder.prefill(request, budget=1)
    back = decoder.finish(request)
    assert_settles(decoder)
    assert (back["do_remote_decode"], back["do_remote_prefill"]) == (True, False)
    assert back["remote_port"] == ports[1]
    assert back["kvferry"]["chunks"] == 8
    history = [*request.all_token_ids, *range(30)]
    assert decode(prefiller, back, history, "turn 2") == 64
    assert prefiller.observer["hit_tokens/peer"] == 64 - HIT


def test_a_window_of_which_a_part_is_held_is_brought_whole(peers, tmp_path):
    prefiller = peers(groups=WINDOWED, store=open_directory(tmp_path / "store"))
    prefill(prefiller)
    prefiller.forget_memory()
    assert prefiller.run("plain", PROMPT).num_external_tokens == HIT
    assert_settles(prefiller)
    assert prefill(prefiller)["kvferry"]["chunks"] == NUM_CHUNKS


@pytest.mark.parametrize("first", ["the other", "the prefill"])
def test_what_another_request_fetches_and_leaves_is_brought_for_peers(peers, tmp_path, first):
    """The answer names what is on its way, so a client that goes must not end that."""
    store = HangsLater(open_directory(tmp_path / "store"), ("read",))
    prefiller = peers(store=store)
    prefill(prefiller)
    prefiller.forget_memory()
    store.gate = Gate()

    def begin_other():
        request = prefiller.add("other", PROMPT)
        assert prefiller.scheduler.lookup(request, 0).num_tokens is None
        prefiller.step([])
        return request

    other = begin_other() if first == "the other" else None
    answer = start_prefill(prefiller, options=RequestOptions(load=False))
    assert answer["kvferry"]["chunks"] == NUM_CHUNKS
    prefiller.finish(other or begin_other())
    prefiller.step([])
    store.gate.release()
    store.gate = None
    assert_settles(prefiller)
    assert decode(peers(None, [answer["remote_port"]]), answer) == HIT


def test_a_prefiller_without_a_store_says_what_it_holds_and_copies_it_once(peers):
    (port,) = free_ports(1)
    prefiller = peers(reads=[port], tiers=True)  # nobody is there
    for number in range(2):
        request = prefiller.admitted(f"prefill {number}", PROMPT, handover=read_handover(ASKED))
        prefiller.prefill(request)
        assert_settles(prefiller)
        answer = prefiller.finish(request)
        assert answer["kvferry"]["chunks"] == NUM_CHUNKS
        assert prefiller.observer["put_failed"] == NUM_CHUNKS
    assert decode(peers(None, [answer["remote_port"]]), answer) == HIT


@pytest.mark.parametrize("fault", ["it lost them", "it is gone"])
def test_what_a_prefiller_said_that_it_holds_and_has_not_is_not_waited_for(peers, tmp_path, fault):
    """A store beside it, which might be shared, does not change that."""
    prefiller = peers()
    answer = prefill(prefiller)
    if fault == "it lost them":
        prefiller.forget_memory()
    else:
        prefiller.parts[0].close()
    key_file = prefiller.parts[0].config.serve.partition("?")[2]
    peer = f"peer://{LOCALHOST}:{answer['remote_port']}?{key_file}"
    urls = [(tmp_path / "own").as_uri(), peer]
    with open_store(urls, namespace=prefiller.scheduler.requests.namespace) as store:
        decoder = peers(None, store=store)
        assert decode(decoder, answer) == 0
        assert_settles(decoder)


def test_an_engine_that_lists_itself_alone_computes_what_it_lacks(peers):
    (port,) = free_ports(1)
    host = peers(port, [port], tiers=True, load_timeout_seconds=0.2)
    waiting = {"do_remote_prefill": True, "remote_host": LOCALHOST, "remote_port": port}
    assert decode(host, waiting) == 0  # it waits for itself, for a bounded time
    assert decode(host, waiting, name="of memory") == HIT
    assert_settles(host)
    assert host.scheduler.is_idle


@pytest.mark.parametrize(
    ("serve", "is_sure"),
    [
        ("127.0.0.1:{port}?", True),
        ("0.0.0.0:{port}?", True),
        ("127.0.0.1:0?advertise=127.0.0.1:{port}&", True),
        ("127.0.0.1:0?", False),
        ("127.0.0.2:{port}?", False),  # another engine may listen at the other address
    ],
)
def test_one_list_of_peers_serves_them_all_as_none_asks_itself(peers, tmp_path, serve, is_sure):
    own, other = free_ports(2)
    serve = serve.format(port=own) + f"key_file={tmp_path / 'peers.key'}"
    host = peers(None, [own, other], tiers=True, serve=serve)
    urls = [status.stat().url for status in host.parts[0].store.tiers()]
    assert (f"{LOCALHOST}:{own}" in str(urls)) is not is_sure
    assert f"{LOCALHOST}:{other}" in str(urls)


def test_a_circle_of_peers_ends_and_passes_no_question_on(peers):
    ports = free_ports(3)
    # The first two wait for nothing. The third finds all, however slow this machine is.
    circle = [
        peers(port, [ports[number - 1]], tiers=True, load_timeout_seconds=seconds)
        for number, (port, seconds) in enumerate(zip(ports, (0.2, 0.2, 30.0), strict=True))
    ]
    waiting = {"do_remote_prefill": True}
    threads = [threading.Thread(target=decode, args=(host, waiting)) for host in circle[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert_settles(circle[1])
    # The third reads from the second; nobody reads from the third.
    assert decode(circle[2], waiting) == HIT
    for host in circle:
        assert_settles(host)
        wait_until(lambda lent=host.pool.loans: lent.num_lent == 0, "the loans are back")


@pytest.mark.parametrize(("reader", "num_refused"), [("in clear", 0), ("of another authority", 1)])
def test_inside_tls_only_a_reader_with_a_certificate_gets_anything(
    peers, tmp_path, caplog, reader, num_refused
):
    """One that speaks no TLS gets no answer at all."""

    def files_of(authority):
        files = make_files(make_authority(tmp_path / authority), "peer")
        return "".join(f"&{option}={path}" for option, path in files._asdict().items())

    ours = files_of("ours")
    theirs = files_of("theirs") if num_refused else ""
    prefiller = peers(tls=ours)
    port = prefill(prefiller)["remote_port"]
    waiting = {"do_remote_prefill": True}
    assert decode(peers(None, [port], tls=ours, tiers=True), waiting) == HIT
    served = "peer_served_records"
    wait_until(lambda: prefiller.observer[served] == NUM_CHUNKS, "all are counted")
    caplog.clear()
    stranger = peers(None, [port], tls=theirs, tiers=True)
    for number in range(4):
        assert decode(stranger, waiting, name=f"decode {number}") == 0
        assert_settles(stranger)
        stranger.forget_memory()
    refused = "peer_refused"
    wait_until(lambda: prefiller.observer[refused] >= num_refused, "it is counted")
    assert prefiller.observer[served] == NUM_CHUNKS
    assert (prefiller.observer[refused] > 0) is (num_refused > 0)
    said = num_said(caplog.messages, "not used until", "a peer is refused")
    assert said == [1, num_refused]


def test_a_peer_whose_address_does_not_resolve_costs_its_own_hits_only(peers, caplog):
    prefiller = peers()
    answer = prefill(prefiller)
    nowhere, here = "no.such.host.invalid:7100", f"{LOCALHOST}:{answer['remote_port']}"
    key_file = prefiller.parts[0].config.serve.partition("?")[2]
    reader = peers(None, store=f"peer://{nowhere}?{key_file}")
    caplog.clear()
    for number in range(4):
        assert decode(reader, {"do_remote_prefill": True}, name=f"decode {number}") == 0
        assert_settles(reader)
        reader.forget_memory()
    (line,) = caplog.messages
    assert nowhere in line
    assert reader.observer["store_probe_failed"] > 0
    reader = peers(None, store=f"peer://{nowhere},{here}?{key_file}")
    assert decode(reader, answer) == HIT
    assert_settles(reader)


def test_engines_of_one_configuration_serve_at_its_port_and_their_index(peers):
    ports = sorted(free_ports(2))
    prompts = [PROMPT, list(range(200, 241))]
    engines = [peers(ports[0], data_parallel_index=port - ports[0]) for port in ports]
    answers = [prefill(*each) for each in zip(engines, prompts, strict=True)]
    assert [answer["remote_port"] for answer in answers] == ports
    reader = peers(None, ports)
    for answer, prompt in zip(answers, prompts, strict=True):
        assert decode(reader, answer, prompt, f"of port {answer['remote_port']}") == HIT
    for engine in engines:
        wait_until(lambda seen=engine.observer: seen["peer_served_bytes"] > 0, "it is counted")


def test_strangers_keep_no_peer_out(peers):
    """They take all places and say nothing."""
    prefiller = peers()
    answer = prefill(prefiller)
    strangers = [Raw(prefiller.server) for _ in range(64)]
    wait_until(lambda: prefiller.server.num_connections == 64, "all places are taken")
    assert decode(peers(None, [answer["remote_port"]]), answer) == HIT
    for each in strangers:
        each.close()
