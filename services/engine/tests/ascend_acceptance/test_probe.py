from acl_emulator import build

from spillway_engine.ascend_acceptance.probe import probe_figures, run_probe

PRINTED = """\
PASS  versions: runtime 9.1.0; interface 1.17; not exported: nothing
INFO  rate store, pageable: contiguous 3.10 GB/s
FAIL  pinning: by acl, mlock too; 1024 MiB submitted in 9.00 ms, copied in 10.00 ms: the copy is not asynchronous
INFO  rate load, pinned, 64 x 16 KiB: loop 1.25 GB/s, 3.00 us of the thread a piece; batch 9.50 GB/s, 0.20 us of it
INFO  batch answers: a descriptor of no bytes is answered with 107000
FAILED: see the lines above
"""


def test_verdicts_and_rates_become_keys_with_their_units() -> None:
    assert probe_figures(PRINTED) == {
        "emulator": False,
        "probe_versions_verdict": "PASS",
        "probe_versions": "runtime 9.1.0; interface 1.17; not exported: nothing",
        "probe_store_pageable_contiguous_gb_per_second": 3.10,
        "probe_pinning_verdict": "FAIL",
        "probe_pinning": "by acl, mlock too; 1024 MiB submitted in 9.00 ms, copied in 10.00 ms: the copy is not "
        "asynchronous",
        "probe_load_pinned_16_kib_loop_gb_per_second": 1.25,
        "probe_load_pinned_16_kib_batch_gb_per_second": 9.50,
        "probe_batch_answers": "a descriptor of no bytes is answered with 107000",
        "probe_failed": [
            "pinning: by acl, mlock too; 1024 MiB submitted in 9.00 ms, copied in 10.00 ms: the copy is not "
            "asynchronous"
        ],
    }


def test_the_probe_runs_and_says_that_it_ran_on_the_emulator() -> None:
    report = probe_figures(run_probe(str(build.library()), device=0, megabytes=32))

    assert report["emulator"] is True
    assert report["probe_failed"] == []
    assert report["probe_events_verdict"] == report["probe_batch_verdict"] == "PASS"
    assert not [key for key in report if key.endswith("gb_per_second")]  # an emulator has no rates


def test_a_runtime_that_is_not_there_is_a_failed_line() -> None:
    assert "cannot be loaded" in str(probe_figures(run_probe("/nonexistent.so", 0, 32))["probe_failed"])
