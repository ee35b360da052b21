from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.lock.server.error_hints import hint_of, is_misconfigured
from celery_redlock.lock.server.rights import ACL_RULES
from tests.pages import ROOT

WRAPPED = "ERR Error running script (call to f_53e2): @user_script:10: @user_script: 10: -"

# In the servers' own words: Valkey 9.1, Redis 7.0 and 6.2.
REPLIES = [
    (False, "LOADING Valkey is loading the dataset in memory"),
    (False, "TRYAGAIN Multiple keys request during rehashing of slot"),
    (False, "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN ..."),
    (False, "ERR max number of clients reached"),
    (False, "NOSCRIPT No matching script. Please use EVAL."),
    (False, "NOREPLICAS Not enough good replicas to write. script: on @user_script:10."),
    (False, "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to ..."),
    (False, "OOM command not allowed when used memory > 'maxmemory'. script: on @user_script:10."),
    (False, "CLUSTERDOWN Hash slot not served"),
    (True, "READONLY You can't write against a read only replica. script: 53e2, on @user_s ..."),
    (True, "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'."),
    (True, "NOAUTH Authentication required."),
    (True, "WRONGPASS invalid username-password pair or user is disabled."),
    (True, "ERR AUTH <password> called without any password configured for the default use ..."),
    (True, "DENIED Running in protected mode because protected mode is enabled and no pass ..."),
    (True, "NOPERM No permissions to access a key"),
    (True, "NOPERM this user has no permissions to access one of the keys used as arguments"),
    (True, "NOPERM User app has no permissions to run the 'info' command"),
    (True, "ERR ACL failure in script: User app has no permissions to run the 'set' command"),
    (True, "ERR The user executing the script can't run this command or subcommand script: 53e2"),
    (True, "MOVED 2639 127.0.0.1:7002"),
    (True, "ASK 2639 127.0.0.1:7002"),
    (True, "CROSSSLOT Keys in request don't hash to the same slot"),
    (True, "ERR SELECT is not allowed in cluster mode"),
    (True, "ERR DB index is out of range"),
    (True, "WRONGTYPE Operation against a key holding the wrong kind of value"),
    (True, "NOPROTO unsupported protocol version"),
    (True, "ERR unknown command 'EVALSHA', with args beginning with: '53e2' '1' '{redlock} ..."),
    (True, "ERR unknown subcommand 'LOAD'. Try SCRIPT HELP."),
    (True, "ERR Unknown Redis command called from script script: 53e2, on @user_script:1."),
    (True, "FENCE exhausted"),
    (True, "ERR value at {redlock}:fence is not an integer or out of range"),
    (False, "ERR wrong number of arguments for 'get' command"),
    (False, "ERR value is not an integer or out of range"),
    (False, ""),
]

# In the words of the system, of redis-py and of this package.
CONNECTIONS = [
    (False, "Error 111 connecting to 127.0.0.1:6379. Connection refused"),
    (False, "Error 113 connecting to redis-2:6379. No route to host"),
    (False, "Error -2 connecting to nowhere:6379. Name or service not known"),
    (False, "Error -3 connecting to redis-2:6379. Temporary failure in name resolution"),
    (False, "Error 2 connecting to /run/redis.sock. No such file or directory"),
    (False, "Timeout connecting to server"),
    (False, "No master found for 'locks'"),
    (False, "Redis is loading the dataset in memory"),
    (False, "max number of clients reached"),
    (False, "no answer within 0.2 s"),
    (False, "no answer in time"),
    (False, "timed out"),
    (False, "Timeout reading from socket"),
    (False, "Error while reading from socket: (104, 'Connection reset by peer')"),
    (False, "connection closed by the server"),
    (False, "connection closed by the server instead of a reply"),
    (False, "Connection closed by server"),
    (False, "[Errno 32] Broken pipe"),
    (False, "EOF occurred in violation of protocol (_ssl.c:2427)"),
    (False, "an unexpected answer"),
    (False, "closed in the middle of a command"),
    (True, "The previous master is now a slave"),
    (True, "Authentication required"),
    (True, "invalid username-password pair or user is disabled"),
    (True, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate"),
    (True, "Error 1 connecting to 127.0.0.1:6379. [SSL: WRONG_VERSION_NUMBER] wrong versio ..."),
    (True, "it answers without TLS"),
    (True, "cannot read ssl_ca_certs: No such file or directory"),
    (True, "[X509: NO_CERTIFICATE_OR_CRL_FOUND] no certificate or crl found (_ssl.c:4154)"),
    (True, "[SSL: TLSV1_ALERT_UNKNOWN_CA] tlsv1 alert unknown ca (_ssl.c:2580)"),
    (True, "[SSL: SSLV3_ALERT_HANDSHAKE_FAILURE] sslv3 alert handshake failure (_ssl.c:1006)"),
    (False, "Sentinel a:1: Error 111 connecting to a:1. Connection refused"),
    (False, "Sentinel a:1: No master found for 'locks'"),
    (True, "Sentinel a:1: Timeout connecting to server; Sentinel b:2: Authentication required"),
    (True, "[SSL] record layer failure (_ssl.c:1000) RECORD_LAYER_FAILURE"),
    (True, 'not a Redis server: Protocol error, got "H" as reply type byte'),
]
CODES = sorted({text.split()[0] for _, text in REPLIES if text[:4].strip() not in ("ERR", "")})


@pytest.mark.parametrize(("misconfigured", "text"), REPLIES + CONNECTIONS)
def test_a_misconfiguration_is_known_by_the_words_of_whoever_made_the_error(
    misconfigured: bool, text: str
) -> None:
    assert is_misconfigured(text) is misconfigured
    assert hint_of(text) or not misconfigured


@pytest.mark.parametrize("code", CODES)
def test_a_code_that_an_old_server_wraps_means_what_it_means_alone(code: str) -> None:
    assert is_misconfigured(WRAPPED + code) is is_misconfigured(code)
    assert hint_of(WRAPPED + code) == hint_of(code)


def test_a_wrapped_refusal_of_rights_is_one() -> None:
    assert is_misconfigured(f"{WRAPPED[:-1]}The user executing the script can't run this command")


@pytest.mark.parametrize("code", CODES)
def test_an_argument_that_a_server_repeats_decides_nothing(code: str) -> None:
    text = f"ERR unknown command 'EVALSHA', with args beginning with: '{{redlock}}:lock:{code}'"
    assert hint_of(text) == hint_of("ERR unknown command 'EVALSHA'")


@pytest.mark.parametrize("code", CODES)
def test_a_code_inside_a_longer_word_is_none(code: str) -> None:
    text = f"ERR X{code} is not {code}X"
    assert (is_misconfigured(text), hint_of(text)) == (False, "")


@pytest.mark.parametrize(
    ("text", "clause"),
    [
        ("", ""),
        ("ERR value is not an integer or out of range", ""),
        ("NOSCRIPT No matching script. Please use EVAL.", ""),
        ("no answer within 0.2 s", ""),
        ("Error while reading from socket: (104, 'Connection reset by peer')", ""),
        ("an unexpected answer", ""),
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
        ("Sentinel a:1: refused; Sentinel b:1: Authentication required", "sentinel_password"),
        ("Sentinel a:1: invalid username-password pair", "sentinel_password"),
        ("certificate verify failed: certificate has expired", "renew its certificate"),
        ("certificate verify failed: Hostname mismatch, certificate", "names other hosts"),
        ("certificate verify failed: self-signed certificate", "name the CA"),
        ("tlsv13 alert certificate required (_ssl.c:2580)", "asks for a client certificate"),
        ("tlsv1 alert unknown ca (_ssl.c:2580)", "refuses our certificate"),
    ],
)
def test_a_hint_names_what_to_change_if_anything(text: str, clause: str) -> None:
    assert clause in hint_of(text)
    assert bool(hint_of(text)) is bool(clause)


def test_the_hint_and_the_page_have_the_same_rights() -> None:
    """These are enough for all that a lock does: tests/contract/test_inspection.py."""
    page = (ROOT / "docs" / "operations" / "security.md").read_text(encoding="utf-8")
    [words] = re.findall(r"^ACL SETUSER locks on >secret (.+)$", page, re.MULTILINE)
    assert words.replace("{redlock}", "{prefix}") == ACL_RULES
    assert ACL_RULES in hint_of("NOPERM No permissions to access")


@given(st.text())
def test_of_any_text_every_misconfiguration_has_a_hint(text: str) -> None:
    assert hint_of(text) or not is_misconfigured(text)
