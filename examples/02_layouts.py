"""Define a mesh and two layouts, and print the cheapest redistribution from one to the other. Imports no torch."""

from hyper_parallel.ir import Layout, Mesh, redistribute

mesh = Mesh((("dp_shard", 2), ("tp_x", 4)))
print(mesh, "- tensor-parallel groups:", mesh.groups("tp_x"))

# An MLP weight [mlp, embed]: tensor parallelism shards its rows, and FSDP shards the rows of each rank further.
stored = Layout((("tp_x", "dp_shard"), ()), dims=("mlp", "embed"))
used = Layout((("tp_x",), ()), dims=("mlp", "embed"))
shape = (14336, 4096)
print("stored", stored, "- rank 5 holds", stored.local_shape(shape, mesh, mesh.coordinate(5)))
print("used  ", used, "- rank 5 holds", used.local_shape(shape, mesh, mesh.coordinate(5)))

for step in redistribute(stored, used, mesh, shape, dtype_bytes=2):
    print(f"{step.kind} over {step.axis}: {step.sent_bytes / 2**20:.0f} MiB sent per rank")
