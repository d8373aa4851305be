"""Programs the tests plan: a chain of layers with weights, saved results, gradients and optimizer state."""

from hyper_parallel.ir import MemoryProgram, Operator, Storage


def training_chain(layers=6, act=1000, weight=400, alignment=1, clip=False, seconds=1.0):
    """Forward, backward and update of a chain: each layer has a cheap pointwise result and a matrix product."""
    storages, ops = [], []

    def new(name, size, kind, start=False, end=False):
        storages.append(Storage(name, size, kind, start, end))
        return len(storages) - 1

    x = new("input", act, "input", True, True)
    weights = [new(f"w{i}", weight, "weight", True, True) for i in range(layers)]
    states = [new(f"m{i}", 2 * weight, "optimizer", True, True) for i in range(layers)]
    saved = []
    h = x
    for i in range(layers):
        p = new(f"act{i}", act, "activation")
        y = new(f"mm{i}", act, "activation")
        ops.append(Operator("pointwise", (h,), (), (p,), 0.01 * seconds, repeatable=True))
        ops.append(Operator("mm", (p, weights[i]), (), (y,), seconds, repeatable=True))
        saved.append((h, p))
        h = y
    g = new("loss_grad", act, "activation")
    loss = new("loss", 8, "output", False, True)
    ops.append(Operator("loss", (h,), (), (loss, g), 0.01 * seconds))
    grads = [0] * layers
    for i in reversed(range(layers)):
        h, p = saved[i]
        grads[i] = new(f"g{i}", weight, "gradient")
        ops.append(Operator("mm_dw", (p, g), (), (grads[i],), seconds, phase="backward"))
        d = new(f"d{i}", act, "activation")
        ops.append(Operator("mm_dx", (g, weights[i], h), (), (d,), seconds, phase="backward"))
        g = d
    if clip:
        norm = new("norm", 8, "scratch")
        ops.append(Operator("norm", tuple(grads), (), (norm,), 0.01 * seconds, phase="optimizer"))
        ops += [Operator("scale", (norm, g), (g,), (), 0.01, phase="optimizer") for g in grads]
    for i in range(layers):
        reads = (weights[i], states[i], grads[i])
        ops.append(Operator("adamw", reads, reads[:2], (), 0.05 * seconds, phase="optimizer"))
    return MemoryProgram("chain", tuple(storages), tuple(ops), alignment)


def headed_step(layers=48, act=1000, wide=3500, head=9000):
    """Training step of a chain with an embedding and a head that are large compared with a layer."""
    storages, ops = [], []

    def new(name, size, kind, keep=False):
        storages.append(Storage(name, size, kind, keep, keep))
        return len(storages) - 1

    def op(name, reads, writes, allocs, seconds, phase="forward"):
        ops.append(Operator(name, reads, writes, allocs, seconds, phase=phase))

    embed, last = new("embed", head, "weight", True), new("head", head, "weight", True)
    x = new("x", act, "activation")
    op("embedding", (embed,), (), (x,), 0.01)
    saved = []
    for _ in range(layers):
        a, up, y = (new(n, s, "activation") for n, s in (("a", act), ("up", wide), ("y", act)))
        op("norm", (x,), (), (a,), 0.1)
        op("up", (a,), (), (up,), 1.0)
        op("down", (up, x), (), (y,), 1.0)
        saved.append((x, a, up))
        x = y
    d, logits = new("d", act, "activation"), new("logits", head, "scratch")
    grad = new("dhead", head, "gradient")
    op("loss", (x, last), (), (d, logits), 1.0)
    op("dhead", (logits, x), (), (grad,), 1.0, "backward")
    op("update", (grad, last), (last,), (), 0.1, "optimizer")
    for x, a, up in reversed(saved):
        e, before = new("dup", wide, "activation"), new("dx", act, "activation")
        op("ddown", (d, up), (), (e,), 2.0, "backward")
        op("dup", (e, a, d, x), (), (before,), 2.0, "backward")
        d = before
    grad = new("dembed", head, "gradient")
    op("dembed", (d,), (), (grad,), 0.1, "backward")
    op("update", (grad, embed), (embed,), (), 0.1, "optimizer")
    return MemoryProgram("headed", tuple(storages), tuple(ops), 1)
