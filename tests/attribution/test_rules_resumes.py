"""Rules about the lives of a run, and about what came after a record: each says what it says only where it should."""

from __future__ import annotations

from typing import Any

from keepstep.attribution.rules import aftermath, resumes
from keepstep.records.event import Event
from tests.attribution.ruling import conclusion, event, told


def at(line: int, signature: str, text: str = "", **attrs: Any) -> Event:
    """An event without a clock, at a line of the one file."""
    return event(signature, text=text, line=line, **attrs)


def going(line: int, first: int = 1, last: int = 20, *, count: int = 2) -> Event:
    """Steps that begin at a line and end at the next."""
    one = at(line, "job.progress", first_step=first, last_step=last, last_order=line + 1, before_last_order=line)
    return type(one)(**{f: getattr(one, f) for f in one.__struct_fields__} | {"count": count})


class TestSecondLives:
    def test_saves_with_the_same_bytes(self) -> None:
        saves = [at(n, "ckpt.digest", step=str(n), digest="4be1c90d", file="/w.pt") for n in (1, 2, 3)]
        assert conclusion(resumes.saves_repeat, *saves).attrs["steps"] == "1, 2, 3"
        assert not told(resumes.saves_repeat, *saves[:2])
        assert told(resumes.saves_repeat, *saves[:2], at(9, "ckpt.digest_live", digest="e7720a31"))
        assert not told(resumes.saves_repeat, *saves[:2], at(9, "ckpt.digest_live", digest="4BE1C90D"))

    def test_parts_that_do_not_change_say_nothing(self) -> None:
        same = [at(n, "ckpt.digest", f"step_{n}/tokenizer.model", step=str(n), digest="aa11") for n in (1, 2, 3)]
        assert not told(resumes.saves_repeat, *same)

    def test_data_that_begins_again(self) -> None:
        before, life = at(1, "ckpt.data_index", pos="307072"), at(5, "ckpt.loaded", step="2400")
        assert conclusion(resumes.data_again, before, life, at(6, "ckpt.data_index", pos="0")).attrs["pos"] == 0
        assert not told(resumes.data_again, before, life, at(6, "ckpt.data_index", pos="307200"))
        assert not told(resumes.data_again, before, at(3, "ckpt.data_index", pos="0"))  # an epoch that ended

    def test_a_rate_that_jumps_is_the_scripts_where_the_script_is_quoted(self) -> None:
        rates = at(1, "ckpt.rate", step="5999", rate="2.4e-05"), at(9, "ckpt.rate", step="6001", rate="3.3e-07")
        life, code = at(5, "ckpt.loaded", step="6000"), at(0, "ckpt.own_schedule_code")
        assert told(resumes.rate_jumps, *rates, life) == ["derived.ckpt.rate_jumps"]
        assert told(resumes.rate_jumps, code, *rates, life) == ["derived.ckpt.own_schedule"]
        assert not told(resumes.rate_jumps, *rates)
        slow = at(9, "ckpt.rate", step="6001", rate="2.39e-05")
        assert not told(resumes.rate_jumps, code, rates[0], life, slow)

    def test_what_works_with_another_build(self) -> None:
        save, crash = at(1, "ckpt.at_work"), at(2, "exit.sigsegv")
        remark = "# attempt 3 with mode=spawn: saved"
        works = at(3, "ckpt.other_works", remark, setting="mode=spawn")
        assert "exit.sigsegv" in conclusion(resumes.other_works, save, crash, works).attrs["explains"]
        assert not told(resumes.other_works, crash, works)  # nothing to do with saves
        assert not told(resumes.other_works, save, works)  # nothing failed
        elsewhere = at(3, "ckpt.other_works", "with ckpt_dir=local: ok", setting="ckpt_dir=local")
        assert not told(resumes.other_works, save, crash, elsewhere)
        in_vain = at(3, "ckpt.other_works", "with mode=spawn: still crashes, load ok", setting="mode=spawn")
        assert not told(resumes.other_works, save, crash, in_vain)

    def test_a_write_that_failed_for_a_moment(self) -> None:
        failed, back = at(1, "torch.write_failed"), at(2, "lustre.restored")
        assert told(resumes.write_passed, failed, back)
        assert not told(resumes.write_passed, failed, back, at(3, "fs.no_space"))
        assert not told(resumes.write_passed, failed)

    def test_storage_that_is_away_for_others_too(self) -> None:
        lost = at(1, "lustre.evicted")
        assert told(resumes.out_for_all, lost, at(2, "storage.probe", failed="27", of="27"))
        assert not told(resumes.out_for_all, lost, at(2, "storage.probe", failed="3", of="27"))
        assert not told(resumes.out_for_all, at(2, "storage.probe", failed="27", of="27"))

    def test_the_same_step_in_every_attempt(self) -> None:
        nan = at(2, "loss.at_step", step="41337"), at(5, "loss.at_step", step="41337")
        lives = at(1, "ckpt.attempt", attempt="1"), at(4, "ckpt.attempt", attempt="2")
        assert conclusion(resumes.nan_again, *nan, *lives).attrs["step"] == 41337
        assert not told(resumes.nan_again, *nan)
        assert not told(resumes.nan_again, *nan, *lives, at(7, "loss.at_step", step="50000"))


class TestFirstLaunch:
    def test_a_run_that_had_saved_and_counts_from_the_beginning(self) -> None:
        first, save, start = going(1, 10, 4000), at(3, "job.saving"), at(5, "ckpt.fresh_start")
        assert told(resumes.began_anew, first, save, start, going(7)) == ["derived.ckpt.fresh_over_existing"]
        assert not told(resumes.began_anew, first, start, going(7))
        assert not told(resumes.began_anew, save, start, going(7))

    def test_nothing_to_load_and_steps(self) -> None:
        start = at(1, "ckpt.none_yet")
        assert told(resumes.first_launch, start, going(3))
        assert not told(resumes.first_launch, start)
        assert not told(resumes.first_launch, start, going(3, count=1))

    def test_an_earlier_life_is_no_first_launch(self) -> None:
        start = at(5, "ckpt.fresh_start")
        for older in (
            at(9, "ckpt.listed", step="4000"),
            at(1, "ckpt.committed", step="4000"),
            at(6, "ckpt.attempt", attempt="2"),
            going(1, 3000, 4000),
            at(7, "ckpt.optimizer_lost"),
        ):
            assert not told(resumes.first_launch, older, start, going(8)), older.signature


class TestAfterARecord:
    def test_a_reason_older_than_the_machine(self) -> None:
        drain = event("slurm.node_drain", node="w-21", since="2031-07-24T13:05:10")
        new = at(3, "sched.machine_created", "2031-07-24T16:44:51Z instance e0 (w-21) created")
        old = at(3, "sched.machine_created", "2031-07-20T16:44:51Z instance e0 (w-21) created")
        assert told(aftermath.reason_outdated, drain, new)
        assert not told(aftermath.reason_outdated, drain, old)
        assert not told(aftermath.reason_outdated, drain, new, at(9, "fs.io_error"))

    def test_a_check_that_the_thing_contradicts(self) -> None:
        claim, works = at(1, "sched.check_claim"), at(4, "sched.thing_works")
        assert told(aftermath.check_contradicted, claim, works)
        assert not told(aftermath.check_contradicted, works, at(6, "sched.check_claim"))
        assert not told(aftermath.check_contradicted, claim, works, at(5, "xid.79"))

    def test_a_drill_that_is_over(self) -> None:
        fact, fault = at(1, "drill.fact"), at(2, "xid.79")
        assert told(aftermath.drilled, fact, fault, going(5))
        assert not told(aftermath.drilled, fault, going(5))
        assert told(aftermath.drilled, fact, going(5))
        assert not told(aftermath.drilled, going(1), at(9, "drill.fact"))
        assert not told(aftermath.drilled, fact, fault, going(5), at(9, "xid.79"))
        assert not told(aftermath.drilled, at(0, "xid.48"), fact, fault, going(5))

    def test_devices_that_are_back(self) -> None:
        none, again = at(1, "k8s.devices_offered", offered="0"), at(4, "k8s.devices_offered", offered="8")
        assert told(aftermath.devices_back, none, again)
        assert not told(aftermath.devices_back, again, at(6, "k8s.devices_offered", offered="0"))
        assert not told(aftermath.devices_back, none, again, at(5, "k8s.admission_devices"))

    def test_a_requeue_of_the_wrong_job(self) -> None:
        refused, other = at(1, "slurm.requeue_refused"), at(2, "slurm.job_requeued")
        assert told(aftermath.wrong_requeue, refused, other)
        assert not told(aftermath.wrong_requeue, refused)

    def test_maintenance_of_a_machine_that_works(self) -> None:
        told_of = at(1, "cloud.maintenance")
        assert told(aftermath.maintenance_ahead, told_of, going(2))
        assert not told(aftermath.maintenance_ahead, told_of)
        assert not told(aftermath.maintenance_ahead, told_of, going(2), at(9, "xid.79"))
