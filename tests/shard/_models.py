"""Parameter lists of small decoder-only models, in the naming of Hugging Face."""

import pytest

from hyper_parallel.shard import family_rules, plan_layouts

EMBED, MLP, VOCAB, HEAD_DIM = 64, 96, 240, 8
LLAMA = family_rules("llama")
AT = "model.layers.*"


def decoder(num_heads=8, num_kv_heads=4, mlp=MLP, vocab=VOCAB, layer="*", bias=False, qk_norm=False):
    at = f"model.layers.{layer}"
    q, kv = num_heads * HEAD_DIM, num_kv_heads * HEAD_DIM
    sizes = {
        "model.embed_tokens": (vocab, EMBED),
        f"{at}.input_layernorm": (EMBED,),
        f"{at}.self_attn.q_proj": (q, EMBED),
        f"{at}.self_attn.k_proj": (kv, EMBED),
        f"{at}.self_attn.v_proj": (kv, EMBED),
        f"{at}.self_attn.o_proj": (EMBED, q),
        f"{at}.mlp.gate_proj": (mlp, EMBED),
        f"{at}.mlp.up_proj": (mlp, EMBED),
        f"{at}.mlp.down_proj": (EMBED, mlp),
        "model.norm": (EMBED,),
        "lm_head": (vocab, EMBED),
    }
    params = [(f"{module}.weight", shape, ()) for module, shape in sizes.items()]
    if bias:
        params += [(f"{m}.bias", s[:1], ()) for m, s in sizes.items() if m.endswith("_proj")]
    if qk_norm:
        params += [(f"{at}.self_attn.{n}_norm.weight", (HEAD_DIM,), ()) for n in "qk"]
    return params


def sizes(num_heads=8, num_kv_heads=4, vocab=VOCAB):
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab,
    }


def plan(strategy, rules=LLAMA, params=None, **numbers):
    params = decoder(**numbers) if params is None else params
    wanted = {k: v for k, v in numbers.items() if k in ("num_heads", "num_kv_heads", "vocab")}
    return plan_layouts(params, rules, strategy, **sizes(**wanted), where="r.yaml: parallel.tp_x")


def refused(error, strategy, rules=LLAMA, params=None, **numbers):
    with pytest.raises(error) as caught:
        plan(strategy, rules, params, **numbers)
    assert caught.value.where == "r.yaml: parallel.tp_x"
    return caught.value
