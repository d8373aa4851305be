"""Your own training loop on four ranks: an unmodified transformers model, FSDP x tensor parallelism."""

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import hyper_parallel as hp
from hyper_parallel.model import spec_from_config
from hyper_parallel.runtime import World, clip_grad_norm_, launch, parallelize

CONFIG = Qwen3Config(
    vocab_size=512, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=4, head_dim=8, tie_word_embeddings=True,
)  # fmt: skip
STEPS, BATCH, SEQ_LEN = 5, 8, 32


def train(strategy: hp.Strategy) -> list[float]:
    """Train on `strategy.world_size` local ranks and return the loss of every step."""
    spec = spec_from_config(CONFIG.to_dict(), name="tiny-qwen3")
    workload = hp.Workload(
        SEQ_LEN, tokens_per_step=BATCH * SEQ_LEN, microbatch=BATCH // strategy.dp,
        compute_dtype="float64", param_dtype="float64", reduce_dtype="float64",
    )  # fmt: skip
    plan = hp.plan(spec, "local", workload, num_devices=strategy.world_size, strategy=strategy)

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG).double()
    tokens = torch.randint(0, CONFIG.vocab_size, (STEPS, BATCH, SEQ_LEN))

    def rank_main(rank: int) -> tuple[list[float], int]:
        with World.join() as world:
            shared = parallelize(model, plan, world)  # same class, same parameter names
            optimizer = torch.optim.AdamW(shared.parameters(), lr=1e-3)
            coordinate = plan.mesh.coordinate(rank)
            data_rank = coordinate["dp_replicate"] * strategy.dp_shard + coordinate["dp_shard"]
            losses = []
            for step in range(STEPS):
                mine = tokens[step].chunk(strategy.dp)[data_rank]
                # The sum over all ranks is the mean over all tokens that have a next token.
                count = BATCH * (SEQ_LEN - 1)
                loss = shared(input_ids=mine, labels=mine, num_items_in_batch=count).loss
                loss.backward()
                clip_grad_norm_(shared, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            return losses, data_rank

    results = launch(rank_main, strategy.world_size)
    per_data_rank = {data_rank: losses for losses, data_rank in results}
    return [sum(losses) for losses in zip(*per_data_rank.values(), strict=True)]


if __name__ == "__main__":
    one = train(hp.Strategy())
    four = train(hp.Strategy(dp_shard=2, tp_x=2))
    print("one rank  ", [f"{loss:.12f}" for loss in one])
    print("four ranks", [f"{loss:.12f}" for loss in four])
    assert all(abs(a - b) <= 1e-10 * a for a, b in zip(one, four, strict=True))
    print("equal to 10 digits")
