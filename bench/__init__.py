"""Benches: questions answered by interleaved measurements, kept in bench/results/.

    python -m bench --list          the cases, the question each answers, and its bar
    python -m bench cache           cases whose names begin so, tables printed and saved
    python -m bench tuning --only uneven   workloads whose names begin so, nothing saved
    python -m bench --tiny          every case at toy size, nothing saved (make test-all does this)
    python -m bench --gpu           the tests and the cases that need a GPU

check/     the check's verdicts and predictions     cache/     a cache: built, read
scripts/   the check on whole training scripts      dali/      photos by record and replay
loaders/   stock, prefetch, tuning                  peers/     other libraries to compare with

harness.py says how to add a case; gpu.py runs what needs a GPU. results/ keeps the table of each
case's last full run.
"""
