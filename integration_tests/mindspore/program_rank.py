"""One rank of a job that runs saved step programs once, without torch: `program_rank.py FOLDER RANK RANKS PORT`.

FOLDER/NAME/ is a program of all ranks, FOLDER/NAME.RANK/ one of a single rank. `NAME_RANK.npz` are the inputs. Outputs
are written to `NAME_out_RANK.npz`.
"""

import sys
from pathlib import Path

import numpy as np

from hyper_parallel.backends.program_runner import join_ranks
from hyper_parallel.backends.step_program import StepProgram


def main(folder, rank, ranks, port):
    places = sorted(path.parent for path in folder.glob("*/program.json"))
    programs = {p: StepProgram.load(p) for p in places if p.suffix in ("", f".{rank}")}
    groups = {axis: range(ranks) for axis in ("dp_replicate", "dp_shard")}
    for program in programs.values():
        groups |= program.groups()
    runner = join_ranks("mindspore", rank, ranks, lambda _: port, groups)
    for place, program in programs.items():
        step = runner.compile(program, folder / f"{place.stem}_{rank}.py")
        with np.load(folder / f"{place.stem}_{rank}.npz") as arrays:
            values = {key: runner.value(arrays[key]) for key in arrays.files}
        out = {key: runner.array(value) for key, value in step(values).items()}
        np.savez(folder / f"{place.stem}_out_{rank}.npz", **out)
    runner.close(failed=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
