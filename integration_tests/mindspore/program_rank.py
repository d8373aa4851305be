"""One rank of a job that runs saved step programs once, without torch: `program_rank.py FOLDER RANK RANKS PORT`.

FOLDER/*/ are programs of one rank each, FOLDER/*.npz the inputs: `NAME.npz` of all ranks or `NAME_RANK.npz`. Outputs
are written to `NAME_out_RANK.npz`. Names that begin with `one_` run on rank 0 only.
"""

import sys
from pathlib import Path

import numpy as np

from hyper_parallel.backends.program_runner import join_ranks
from hyper_parallel.backends.step_program import StepProgram


def main(folder, rank, ranks, port):
    axes = ("dp_replicate", "dp_shard")
    groups = {axis: range(ranks) for axis in axes}
    runner = join_ranks("mindspore", rank, ranks, lambda _: port, groups)
    for place in sorted(path.parent for path in folder.glob("*/program.json")):
        if rank and place.name.startswith("one_"):
            continue
        program = StepProgram.load(place)
        step = runner.compile(program, folder / f"{place.name}_{rank}.py")
        values = {}
        for name in (f"{place.name}.npz", f"{place.name}_{rank}.npz"):
            if (folder / name).is_file():
                with np.load(folder / name) as arrays:
                    values |= {key: runner.value(arrays[key]) for key in arrays.files}
        out = {key: runner.array(value) for key, value in step(values).items()}
        np.savez(folder / f"{place.name}_out_{rank}.npz", **out)
    runner.close(failed=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
