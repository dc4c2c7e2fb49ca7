"""Several ranks follow rank 0's numbers, and none hangs when another one ends."""

import re

from dataloaders.scripts.ranks import straggler
from helpers import warm

TWO_RANKS = """
import multiprocessing, sys
import torch.distributed as dist
from dataloaders.scripts.ranks import Ranks
from dataloaders.scripts.stopping import StopScript

def work(rank):
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
    ranks = Ranks.here(patience_s=20)
    for turn in range(3):
        agreed = ranks.agree([10.0 * turn + rank, 0.1])
        assert agreed == [10.0 * turn, 0.1], agreed
    try:
        if rank:
            ranks.agree([1.0])  # rank 0 has gone by then
    except StopScript as stop:
        print("stopped:", stop, flush=True)
    found = ranks.gather({"rank": rank, "wait_s": 0.01 * rank})
    print("rank", rank, "has", found, flush=True)

assert Ranks.here(patience_s=1) is None
context = multiprocessing.get_context("fork")
children = [context.Process(target=work, args=(rank,)) for rank in range(2)]
for child in children: child.start()
for child in children: child.join()
sys.exit(max(child.exitcode for child in children))
"""


def test_ranks_have_rank_0s_numbers_and_end_with_it(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO_RANKS)
    done = warm.run([script, tmp_path / "store"])
    assert done.returncode == 0, done.stderr
    assert "stopped: another rank does not answer" in done.stdout
    assert "rank 1 has []" in done.stdout
    assert re.search(r"rank 0 has \[\{'rank': 0.*'rank': 1", done.stdout)


def test_the_slowest_rank_is_named_with_what_it_costs():
    ranks = [{"rank": rank, "wait_s": 0.002} for rank in range(3)] + [{"rank": 3, "wait_s": 0.03}]
    (sentence,) = straggler(ranks, 4)
    assert sentence.startswith("rank 3 of 4 waits longest for its batches: 30.0 ms for each")
    assert sentence.endswith("which costs 28.0 ms a batch")
    assert straggler(ranks[:2], 3)[1] == "1 of 3 ranks ended without a report"
    assert straggler(ranks[:1], 2) == []
