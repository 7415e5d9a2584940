"""What is refused, under which reason, and that nothing sound is."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawq.core import Entry
from clawq.errors import CorruptFragment
from clawq.replay.validation import Examiner, Fault, FragmentCheck
from clawq.specs import ArraySpec
from clawq.testing.experience import RUN, SPEC, Chances, TrueSlot
from clawq.types import Fragment, Voided

CHECK = FragmentCheck(SPEC, RUN)


def made(seed: int = 0, steps: int = 6, envs: int = 3) -> Fragment:
    slot = TrueSlot("s", envs, np.random.default_rng(seed), count(1), chances=Chances(end=0.3, invalid=0.2))
    slot.fragment(2)
    return slot.fragment(steps)[0]


def entry_of(fragment: Fragment) -> Entry:
    return Entry(fragment.meta.slot, fragment.meta.epoch, fragment.meta.seq, b"")


def fault(fragment: Fragment, check: FragmentCheck = CHECK) -> Fault | None:
    return check.fault(entry_of(fragment), fragment)


def test_sound_fragments_pass() -> None:
    for seed in range(20):
        assert fault(made(seed)) is None


def test_a_notice_that_names_its_own_fragment_passes_as_the_first_of_a_new_epoch_must() -> None:
    fragment = made()
    assert fault(replace(fragment, meta=replace(fragment.meta, voided=(Voided(0, 2, 0),)))) is None


def with_meta(**changes: object) -> Callable[[Fragment], Fragment]:
    return lambda f: replace(f, meta=replace(f.meta, **changes))  # type: ignore[arg-type]


BROKEN = {
    "run": (with_meta(run="f" * 32), "run", "made for run ffff"),
    "env": (with_meta(env="0" * 16), "env", "another environment"),
    "no steps": (with_meta(steps=0), "schema", "at least one step"),
    "steps": (with_meta(steps=5), "schema", r"obs\.state: expected float32\[6, 3, 3\], got float32\[7, 3, 3\]"),
    "envs": (with_meta(envs=2), "schema", "obs.state"),
    "obs keys": (lambda f: replace(f, obs=dict(reversed(f.obs.items()))), "schema", r"obs: expected keys \['state'"),
    "obs dtype": (
        lambda f: replace(f, obs=f.obs | {"picture": f.obs["picture"].astype(np.float32)}),
        "schema",
        r"obs\.picture: expected uint8",
    ),
    "final": (
        lambda f: replace(f, final_obs={key: one[1:] for key, one in f.final_obs.items()}),
        "schema",
        r"final_obs\.state",
    ),
    "action": (lambda f: replace(f, action=f.action[..., :1]), "schema", r"action: expected float32\[6, 3, 2\]"),
    "reward": (lambda f: replace(f, reward=f.reward.astype(np.float64)), "schema", "reward: .*float64"),
    "valid": (lambda f: replace(f, valid=f.valid.astype(np.uint8)), "schema", "valid: expected bool"),
    "voided env": (with_meta(voided=(Voided(3, 1, 0),)), "schema", "voided"),
    "voided future": (with_meta(voided=(Voided(0, 3, 0),)), "schema", "up to seq 2"),
    "voided seq": (with_meta(voided=(Voided(0, 0, 0),)), "schema", "voided"),
    "voided t": (with_meta(voided=(Voided(0, 1, -1),)), "schema", "voided"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_structural_fault_has_its_reason_and_says_what_was_expected(name: str) -> None:
    change, reason, words = BROKEN[name]
    found = fault(change(made()))
    assert found is not None
    assert found.reason == reason
    assert found.meta is None
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(found.detail)


@pytest.mark.parametrize("entry", [Entry("t", 1, 2, b""), Entry("s", 2, 2, b""), Entry("s", 1, 3, b"")])
def test_a_header_that_contradicts_its_stream_entry_is_refused(entry: Entry) -> None:
    found = CHECK.fault(entry, made())
    assert found is not None
    assert found.reason == "identity"


def test_extras_that_the_algorithm_needs_must_be_there_and_others_may() -> None:
    check = FragmentCheck(SPEC, RUN, {"log_prob": ArraySpec(())})
    fragment = made()
    missing = fault(fragment, check)
    assert missing is not None
    assert missing.reason == "schema"
    log_prob = np.zeros((6, 3), np.float32)
    assert fault(replace(fragment, extras={"log_prob": log_prob, "value": np.full(1, np.nan)}), check) is None
    wrong = fault(replace(fragment, extras={"log_prob": log_prob[:2]}), check)
    assert wrong is not None
    assert wrong.reason == "schema"
    log_prob[np.nonzero(fragment.valid)[0][0], np.nonzero(fragment.valid)[1][0]] = np.inf
    nan = fault(replace(fragment, extras={"log_prob": log_prob}), check)
    assert nan is not None
    assert nan.reason == "non_finite"


@given(st.integers(0, 50), st.integers(0, 6), st.integers(0, 2), st.sampled_from([np.nan, np.inf, -np.inf]))
@settings(max_examples=150, deadline=None)
def test_a_number_that_is_not_finite_is_refused_exactly_where_a_valid_row_would_learn_from_it(
    seed: int, t: int, env: int, value: float
) -> None:
    fragment = made(seed)
    boundary = fragment.boundary
    fragment.obs["grid"][t, env, 1, 0] = value
    # The obs is used by the row that begins with it, and by the row that led to it within its episode.
    used = (t < 6 and fragment.valid[t, env]) or (t > 0 and fragment.valid[t - 1, env] and not boundary[t - 1, env])
    found = fault(fragment)
    assert (found is not None) == used
    assert found is None or (found.reason, found.meta) == ("non_finite", fragment.meta)


@given(st.integers(0, 50), st.data())
@settings(max_examples=100, deadline=None)
def test_final_obs_reward_and_action_are_held_to_it_only_where_their_row_is_valid(
    seed: int, choice: st.DataObject
) -> None:
    fragment = made(seed)
    t, env = choice.draw(st.integers(0, 5)), choice.draw(st.integers(0, 2))
    what = choice.draw(st.sampled_from(["reward", "action", "range", "final"]))
    if what == "final":
        ends = np.argwhere(fragment.boundary)
        if len(ends) == 0:
            return
        k = choice.draw(st.integers(0, len(ends) - 1))
        t, env = ends[k]
        fragment.final_obs["state"][k, 1] = np.nan
    elif what == "range":
        fragment.action[t, env, 1] = -1.01
    else:
        getattr(fragment, what)[t, env] = np.nan
    found = fault(fragment)
    assert (found.reason if found else None) == (
        None if not fragment.valid[t, env] else "action_range" if what == "range" else "non_finite"
    )


def test_an_action_at_the_edge_of_policy_space_passes_in_spite_of_rounding() -> None:
    fragment = made()
    fragment.action[:] = np.float32(1.00001)
    assert fault(fragment) is None


def test_the_examiner_counts_undecodable_bytes_under_the_codecs_reason() -> None:
    def decode(payload: bytes) -> Fragment:
        raise CorruptFragment("checksum differs")

    found = Examiner(decode, CHECK).examine(Entry("s", 1, 1, b"x"))
    assert found == Fault("corrupt", "checksum differs")
    fragment = made()
    assert Examiner(lambda payload: fragment, CHECK).examine(entry_of(fragment)) is fragment
