from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.lock.votes import Fault, fault_of, way_out

T, A, M, B = Fault.TRANSIENT, Fault.AMBIGUOUS, Fault.MISCONFIGURED, Fault.UNEXPECTED
WRAPPED = "ERR Error running script (call to f_53e2): @user_script:10: @user_script: 10: -"

# In the servers' own words: Valkey 9.1, Redis 7.0 and 6.2.
REPLIES = [
    (T, "LOADING Valkey is loading the dataset in memory"),
    (T, "TRYAGAIN Multiple keys request during rehashing of slot"),
    (T, "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE."),
    (T, "ERR max number of clients reached"),
    (T, "NOSCRIPT No matching script. Please use EVAL."),
    (T, "NOREPLICAS Not enough good replicas to write. script: on @user_script:10."),
    (T, "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to ..."),
    (T, "OOM command not allowed when used memory > 'maxmemory'. script: on @user_script:10."),
    (T, "CLUSTERDOWN Hash slot not served"),
    (M, "READONLY You can't write against a read only replica. script: 53e2, on @user_script:10."),
    (M, "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'."),
    (M, "NOAUTH Authentication required."),
    (M, "WRONGPASS invalid username-password pair or user is disabled."),
    (M, "ERR AUTH <password> called without any password configured for the default user. Are ..."),
    (M, "DENIED Running in protected mode because protected mode is enabled and no password ..."),
    (M, "NOPERM No permissions to access a key"),
    (M, "NOPERM this user has no permissions to access one of the keys used as arguments"),
    (M, "NOPERM User app has no permissions to run the 'info' command"),
    (M, "ERR ACL failure in script: User app has no permissions to run the 'set' command"),
    (M, "ERR The user executing the script can't run this command or subcommand script: 53e2"),
    (M, "MOVED 2639 127.0.0.1:7002"),
    (M, "ASK 2639 127.0.0.1:7002"),
    (M, "CROSSSLOT Keys in request don't hash to the same slot"),
    (M, "ERR SELECT is not allowed in cluster mode"),
    (M, "ERR DB index is out of range"),
    (M, "WRONGTYPE Operation against a key holding the wrong kind of value"),
    (M, "NOPROTO unsupported protocol version"),
    (M, "ERR unknown command 'EVALSHA', with args beginning with: '53e2' '1' '{redlock}:lock:r'"),
    (M, "ERR unknown subcommand 'LOAD'. Try SCRIPT HELP."),
    (M, "ERR Unknown Redis command called from script script: 53e2, on @user_script:1."),
    (M, "FENCE exhausted"),
    (M, "ERR value at {redlock}:fence is not an integer or out of range"),
    (B, "ERR wrong number of arguments for 'get' command"),
    (B, "ERR value is not an integer or out of range"),
    (B, ""),
]

# In the words of the system, of redis-py and of this package.
CONNECTIONS = [
    (T, "Error 111 connecting to 127.0.0.1:6379. Connection refused"),
    (T, "Error 113 connecting to redis-2:6379. No route to host"),
    (T, "Error -2 connecting to nowhere:6379. Name or service not known"),
    (T, "Error -3 connecting to redis-2:6379. Temporary failure in name resolution"),
    (T, "Error 2 connecting to /run/redis.sock. No such file or directory"),
    (T, "Timeout connecting to server"),
    (T, "No master found for 'locks'"),
    (T, "Redis is loading the dataset in memory"),
    (T, "max number of clients reached"),
    (A, "no answer within 0.2 s"),
    (A, "no answer in time"),
    (A, "timed out"),
    (A, "Timeout reading from socket"),
    (A, "Error while reading from socket: (104, 'Connection reset by peer')"),
    (A, "connection closed by the server"),
    (A, "Connection closed by server"),
    (A, "[Errno 32] Broken pipe"),
    (A, "EOF occurred in violation of protocol (_ssl.c:2427)"),
    (A, "an answer that nobody asked for"),
    (A, "closed in the middle of a command"),
    (M, "The previous master is now a slave"),
    (M, "Authentication required"),
    (M, "invalid username-password pair or user is disabled"),
    (M, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate"),
    (M, "Error 1 connecting to 127.0.0.1:6379. [SSL: WRONG_VERSION_NUMBER] wrong version number"),
    (M, "[SSL] record layer failure (_ssl.c:1000) RECORD_LAYER_FAILURE"),
    (M, 'not a Redis server: Protocol error, got "H" as reply type byte'),
]
CODES = sorted({text.split()[0] for _, text in REPLIES if text[:4].strip() not in ("ERR", "")})


@pytest.mark.parametrize(("fault", "text"), REPLIES + CONNECTIONS)
def test_an_error_is_known_by_the_words_of_whoever_made_it(fault: Fault, text: str) -> None:
    assert fault_of(text) is fault


@pytest.mark.parametrize("code", CODES)
def test_a_code_that_an_old_server_wraps_means_what_it_means_alone(code: str) -> None:
    assert fault_of(WRAPPED + code) is fault_of(code) is not B
    assert way_out(WRAPPED + code) == way_out(code)


def test_a_wrapped_refusal_of_rights_is_one() -> None:
    assert fault_of(f"{WRAPPED[:-1]}The user executing the script can't run this command") is M


@pytest.mark.parametrize("code", CODES)
def test_an_argument_that_a_server_repeats_decides_nothing(code: str) -> None:
    text = f"ERR unknown command 'EVALSHA', with args beginning with: '{{redlock}}:lock:{code}'"
    assert way_out(text) == way_out("ERR unknown command 'EVALSHA'")


@pytest.mark.parametrize("code", CODES)
def test_a_code_inside_a_longer_word_is_none(code: str) -> None:
    assert fault_of(f"ERR X{code} is not {code}X") is B


@pytest.mark.parametrize(("fault", "text"), REPLIES + CONNECTIONS)
def test_every_misconfiguration_has_a_way_out_and_nothing_ambiguous_or_unknown_has(
    fault: Fault, text: str
) -> None:
    if fault is not T:
        assert bool(way_out(text)) == (fault is M)


@pytest.mark.parametrize(
    ("text", "clause"),
    [
        ("READONLY You can't write", "not a primary: name its primary, or its Sentinels"),
        ("NOPERM No permissions to access a key", "~{prefix}:*"),
        ("ERR ACL failure in script: User app has no", "+evalsha"),
        ("MOVED 2639 127.0.0.1:7002", "a cluster member"),
        ("CLUSTERDOWN Hash slot not served", "a cluster member"),
        ("OOM command not allowed", "maxmemory"),
        ("NOREPLICAS Not enough good replicas", "min-replicas-to-write"),
        ("ERR max number of clients reached", "maxclients"),
        ("DENIED Redis is running in protected mode", "protected-mode"),
        ("FENCE exhausted", "{prefix}:fence"),
    ],
)
def test_a_way_out_names_what_to_change(text: str, clause: str) -> None:
    assert clause in way_out(text)


@given(st.text())
def test_any_text_has_a_meaning_and_only_what_is_known_has_a_way_out(text: str) -> None:
    assert fault_of(text) in Fault
    assert fault_of(text) is not B or way_out(text) == ""
