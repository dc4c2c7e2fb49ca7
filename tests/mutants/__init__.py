"""Versions of the package that are wrong, and whether its tests notice: ``make mutants``.

points.py      every small change of a module      modules.toml   which tests are to notice it
broken.py      one text replaced, by hand          broken.toml    where processes and threads meet
tree.py        runs tests in a copy of the tree    baseline.json  what the tests noticed before
run.py         one change at a time, and what     equivalent.toml  changes that make no difference
               was lost since the baseline
"""
