"""Benches: questions answered by interleaved measurements, kept in bench/results/.

    python -m bench --list          the cases, the question each answers, and its bar
    python -m bench stock_gather    one case (or all of a module), table printed and saved
    python -m bench --tiny          every case at toy size, nothing saved (the tests do this)
    python -m bench --gpu           the tests and the cases marked gpu, into one JSON file

`harness.py` says how to add a case.
"""
