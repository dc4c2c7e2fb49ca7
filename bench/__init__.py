"""Benches: questions answered by interleaved measurements, kept in bench/results/.

    python -m bench --list          the cases, the question each answers, and its bar
    python -m bench stock_gather    cases whose names begin so, table printed and saved
    python -m bench --tiny          every case at toy size, nothing saved (make test-all does this)
    python -m bench --gpu           the tests and the cases that need a GPU

harness.py says how to add a case; gpu.py runs what needs a GPU; peers/ has the other libraries that
cases compare with. results/ keeps the table of each case's last full run.
"""
