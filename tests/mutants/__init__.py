"""Faults that are put into a copy of the package on purpose, each with the tests that catch it.

`python3 -m tests.mutants` runs all of them, or those that are named; `--seconds 120 --seed 7` runs
as many as begin in that time, in random order, and ends by saying how many those were. Start with
`table`, which is the list. A mutant names a function, or a script, and a piece of its source: a
rename of either breaks tests/unit/test_mutants.py.
"""
