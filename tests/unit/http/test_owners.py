"""The header in which a gateway says whose request it passes on: who can make one, and which owner it gives."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from phalanx.errors import AdminKeyRefused
from phalanx.http.api_keys import owner_of
from phalanx.http.owners import OWNER, owner_header, owner_on_server

PRINTABLE = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)
OWNERS = PRINTABLE.map(owner_of)
OWN = st.one_of(st.just(""), OWNERS)


@given(own=OWN, owners=st.sets(OWNERS, min_size=2, max_size=4), admin_keys=st.sets(PRINTABLE, min_size=2, max_size=3))
def test_clients_differ_and_each_is_the_same_wherever_it_comes_from(own, owners, admin_keys):
    for admin_key in admin_keys:
        found = {owner: owner_on_server(own, owner_header(owner, admin_key), admin_key) for owner in owners}
        assert len(set(found.values())) == len(owners) and own not in found.values()
        for owner, there in found.items():  # also after a restart, and at another server
            assert owner_on_server(own, owner_header(owner, admin_key), admin_key) == there
    assert len({owner_header(owner, admin_key) for owner in owners for admin_key in admin_keys}) == len(owners) * len(
        admin_keys
    )


@given(owns=st.sets(OWN, min_size=2, max_size=4), owners=st.sets(OWNERS, min_size=1, max_size=3), admin_key=PRINTABLE)
def test_gateways_with_keys_of_their_own_have_no_owner_in_common(owns, owners, admin_key):
    """Nor has one an owner in common with a client that asks the server itself."""
    headers = [None, *(owner_header(owner, admin_key) for owner in owners)]
    found = {owner_on_server(own, header, admin_key) for own in owns for header in headers}
    assert len(found) == len(owns) * len(headers) and not any("/" in owner for owner in found)


@given(own=OWN, owner=OWNERS, admin_key=PRINTABLE, other=PRINTABLE)
def test_who_has_another_admin_key_names_no_owner(own, owner, admin_key, other):
    assume(other != admin_key)
    header = owner_header(owner, other)
    with pytest.raises(AdminKeyRefused, match=f"{OWNER} is not made with this server's --admin-key"):
        owner_on_server(own, header, admin_key)
    with pytest.raises(AdminKeyRefused, match=f"{OWNER}: this server has no --admin-key"):
        owner_on_server(own, header, None)
    assert owner_on_server(own, None, admin_key) == owner_on_server(own, None, None) == own


@given(own=OWN, header=st.one_of(st.text(st.characters(max_codepoint=255)), PRINTABLE), admin_key=PRINTABLE)
def test_what_is_made_without_the_key_is_refused(own, header, admin_key):
    with pytest.raises(AdminKeyRefused):
        owner_on_server(own, header, admin_key)


@given(owner=OWNERS, admin_key=PRINTABLE, data=st.data())
def test_a_header_that_was_changed_is_refused(owner, admin_key, data):
    """Each of its characters counts, and so does its length: nothing of one that was seen makes another."""
    header = owner_header(owner, admin_key)
    at = data.draw(st.integers(0, len(header) - 1))
    letter = data.draw(st.sampled_from("0123456789abcdefABCDEF. /\xe9").filter(lambda letter: letter != header[at]))
    digest, signature = header.split(".")
    changed = [header[:at] + letter + header[at + 1 :], header[:at], header + letter, f"{signature}.{digest}"]
    for one in (*changed, f"{digest}.{digest}", f"{signature}.{signature}", f" {header}", f".{header}"):
        with pytest.raises(AdminKeyRefused):
            owner_on_server("", one, admin_key)


@given(key=PRINTABLE, admin_key=PRINTABLE)
def test_neither_key_is_told(key, admin_key):
    """Nor the hash of the client's, which who has a list of keys could look up."""
    owner = owner_of(key)
    header = owner_header(owner, admin_key)
    assert set(header) <= set("0123456789abcdef.") and len(header) == 65
    assert owner not in header and owner not in owner_on_server("", header, admin_key)
