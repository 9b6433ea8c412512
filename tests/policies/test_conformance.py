"""The conformance suite: every built-in policy and preset keeps its laws, and each law catches one that does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.engine import Decode, Plan, Prefill, View
from sim.errors import SimctlError
from sim.policies import list_policies
from sim.testing import LAWS, PolicyCheckError, check_policy, scenarios

NAMES = [info.name for info in list_policies()]
ALONE = [law for law in LAWS if law != "jobs"]


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_and_preset_keeps_the_laws(name: str) -> None:
    report = check_policy(name, laws=ALONE)
    assert report.kept == tuple(ALONE)


@pytest.mark.parametrize("name", ["vllm", "static-split", "slo-admission"])
def test_runs_do_not_depend_on_their_process(name: str) -> None:
    assert check_policy(name, laws=["jobs"]).ok


class Fair:
    """A sound policy in plain Python: whole prompts in turn, decodes otherwise, the last one evicted."""

    max_num_seqs = 64
    max_num_batched_tokens = 4096

    def plan(self, view: View) -> Plan:
        if view.free_blocks < view.decode_blocks:
            return Plan([], preempt=[self.victim(view)])
        free, chunks = view.free_blocks, []
        for i, size in zip(view.waiting.id.tolist(), view.waiting.target_tokens.tolist(), strict=True):
            free -= view.blocks_for(size)
            if (
                free < 0
                or len(view.running) + len(chunks) >= self.max_num_seqs
                or sum(n for _, n in chunks) + size > 4096
            ):
                break
            chunks.append((i, size))
        return Plan([Prefill(chunks)] if chunks else [Decode()])

    def victim(self, view: View) -> int:
        return int(view.running.id[-1])


class FairOnTwoLanes(Fair):
    """The same on two lanes."""

    lanes = 2
    sm_sets = ((64, 68),)

    def plan(self, view: View) -> Plan:
        prefill, decode = view.lanes
        if not decode.busy and view.free_blocks < view.decode_blocks:
            idle = [
                int(i)
                for i in view.running.id
                if view.open_prefill is None or i not in dict(view.open_prefill.chunks)
            ]
            return Plan(preempt=[idle[-1]])
        launches: list[Any] = []
        free = view.free_blocks
        if not decode.busy and view.running.decoding.any():
            launches.append(Decode(sms=68))
            free -= view.decode_blocks
        if not prefill.busy and not view.open_prefill and len(view.waiting):
            size = int(view.waiting.target_tokens[0])
            if view.blocks_for(size) <= free and len(view.running) < self.max_num_seqs:
                launches.append(Prefill([(int(view.waiting.id[0]), size)], sms=64))
        return Plan(launches)


@pytest.mark.parametrize("policy", [Fair, Fair(), FairOnTwoLanes()])
def test_sound_policies_of_a_users_own_keep_the_laws(policy: Any) -> None:
    assert check_policy(policy, laws=ALONE).ok


class Greedy(Fair):
    """Forgets that KV blocks are finite."""

    def plan(self, view: View) -> Plan:
        if len(view.waiting) and len(view.running) < self.max_num_seqs:
            return Plan([Prefill([(int(view.waiting.id[0]), int(view.waiting.target_tokens[0]))])])
        return Plan([Decode()])


class Broken(Fair):
    """Raises where the queue is empty."""

    def plan(self, view: View) -> Plan:
        _ = view.waiting.id[0]
        return super().plan(view)


class Picky(Fair):
    """Never serves prompts of more than 800 tokens."""

    def plan(self, view: View) -> Plan:
        for k in range(len(view.waiting)):
            if view.waiting.left_tokens[k] <= 800:
                return Plan([Prefill([(int(view.waiting.id[k]), int(view.waiting.left_tokens[k]))])])
        return Plan([Decode()])


class Lazy(Fair):
    """Serves long prompts only when nothing has come for a second."""

    def plan(self, view: View) -> Plan:
        w = view.waiting
        short = [k for k in range(len(w)) if w.left_tokens[k] < 100]
        if len(view.running) or short or not len(w) or view.now_s > 1.5:
            if short:
                return Plan([Prefill([(int(w.id[short[0]]), int(w.left_tokens[short[0]]))])])
            return Plan([Decode()]) if len(view.running) or view.now_s <= 1.5 else super().plan(view)
        return Plan()


class Moody(Fair):
    """Draws from the global generator."""

    def plan(self, view: View) -> Plan:
        if len(view.running) and np.random.default_rng().random() < 0.5:
            return Plan([Decode()])
        return super().plan(view)


class Counting(Fair):
    """Lets the number of its own decisions decide, but claims that its plan may repeat."""

    asked = 0

    def plan(self, view: View) -> Plan:
        self.asked += 1
        if self.asked % 3 and len(view.running) and view.free_blocks >= view.decode_blocks:
            return Plan([Decode()], repeat_for=50)
        return super().plan(view)


class Clairvoyant(Fair):
    """Reads the true output lengths out of the engine's state and serves short answers first."""

    max_num_seqs = 4

    def plan(self, view: View) -> Plan:
        if len(view.waiting) and len(view.running) < self.max_num_seqs and view.free_blocks > 200:
            i = min(view.waiting.id.tolist(), key=lambda i: (view._q.output[i], i))
            return Plan([Prefill([(i, int(view.waiting.left_tokens[view.waiting.id.tolist().index(i)]))])])
        return super().plan(view)


class Fixed132(FairOnTwoLanes):
    """Launches on a set that it has not declared."""

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        wider = [Prefill(x.chunks, sms=96) if isinstance(x, Prefill) else x for x in plan.launches]
        return Plan(wider, preempt=plan.preempt)


BAD = [
    (Greedy, "plans", "needs more KV blocks than are free"),
    (Broken, "plans", "IndexError"),
    (Fixed132, "plans", "on 96 SMs: no such set"),
    (Picky, "no starvation", "nothing can progress"),
    (Moody, "determinism", "run a second time, it gives other results: request"),
    (Counting, "bursts", "step by step instead of in bursts"),
    (Clairvoyant, "hidden outputs", "depend on outputs still to come"),
]


@pytest.mark.parametrize(("policy", "law", "what"), BAD, ids=[row[0].__name__ for row in BAD])
def test_a_breach_is_found_and_explained(policy: type[Fair], law: str, what: str) -> None:
    with pytest.raises(PolicyCheckError) as caught:
        check_policy(policy, laws=ALONE)
    text = str(caught.value)
    assert any(finding.law == law and what in finding.what for finding in caught.value.report.findings), text
    assert f"policy '{policy.__name__}' keeps " in text
    assert f"- {law}: {LAWS[law][0]}" in text
    finding = next(f for f in caught.value.report.findings if f.law == law)
    assert f'again: sim.testing.scenarios()["{finding.scenario}"].run(policy)' in text


def test_who_is_passed_over_for_no_reason_is_found() -> None:
    class Unfair(Fair):
        """The last one to come is served first, and one at a time."""

        max_num_seqs = 1

        def plan(self, view: View) -> Plan:
            if len(view.running):
                return Plan([Decode()])
            return Plan([Prefill([(int(view.waiting.id[-1]), int(view.waiting.left_tokens[-1]))])])

    report = check_policy(Unfair, laws=["no starvation"], raises=False)
    assert report.ok  # last come, first served starves nobody at half the load

    class Hostile(Unfair):
        """Request 0 is served when nobody else is left to come."""

        def plan(self, view: View) -> Plan:
            if len(view.running) or view.waiting.id[0] or len(view.waiting) > 1:
                return super().plan(view)
            served = 39 in view.waiting.id or view.now_s > 30
            return super().plan(view) if served else Plan()

    report = check_policy(Hostile, laws=["no starvation"], raises=False)
    assert not report.ok


def test_what_cannot_be_tried_is_said() -> None:
    class Bound(Fair):
        """Cannot leave its process."""

        def __deepcopy__(self, memo: Any) -> Bound:
            return self

        def __reduce__(self) -> Any:
            raise TypeError("holds a socket")

    report = check_policy(Bound(), laws=["plans", "jobs"])
    assert (report.ok, report.kept, list(report.skipped)) == (True, ("plans",), ["jobs"])
    assert "- jobs: not tried: the policy cannot be sent to another process" in str(report)


def test_a_finding_can_be_run_again() -> None:
    records = scenarios()["lone"].run(Fair())
    assert records.requests["status"].tolist() == ["finished"]


def test_only_laws_that_exist_can_be_asked_for() -> None:
    with pytest.raises(SimctlError, match="no law is called 'speed'; there are plans"):
        check_policy("vllm", laws=["speed"])
    with pytest.raises(SimctlError, match="unknown policy 'vlm'"):
        check_policy("vlm")
