"""Versions of the package that are wrong, and whether its tests notice: ``make mutants``.

points.py  every small change of a module     modules.toml     which tests are to notice it
tree.py    runs tests in a copy of the tree   equivalent.toml  changes that make no difference
run.py     one change at a time               baseline.json    changes that no test notices today
                                              broken.toml      one text replaced, by hand
"""
