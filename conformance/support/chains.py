"""Consecutive steps that a fused group records: their operations, and how they share tensors."""

from __future__ import annotations

# Operation, and the plan's tensor of each of its arguments.
STEPS = (
    ("linear", {"x": "o", "w": "w_o", "y": "a"}),
    ("add_rmsnorm", {"a": "a", "residual": "x", "w_post": "w_post", "w_next": "w_ffn", "sum": "r", "y": "z"}),
    ("fused_ffn", {"x": "z", "w_gate_up": "w_gate_up", "w_down": "w_down", "h": "h", "y": "m"}),
    ("add_rmsnorm", {"a": "m", "residual": "r", "w_post": "w_post_ffn", "w_next": "w_next", "sum": "s", "y": "y"}),
    ("fused_qkv", {"x": "y", "w": "w_qkv", "qkv": "qkv"}),
)
QUERIES = ("linear", {"x": "y", "w": "w_qkv", "y": "qkv"})  # of a layer that reads another layer's cache
# with per-layer input, and queries only
OWN_STEPS = (
    *STEPS[:3],
    ("add_norm", {"a": "m", "residual": "r", "w_post": "w_post_ffn", "sum": "e", "y": "g"}),
    ("per_layer_input", {"x": "g", "w_gate": "w_gate", "ple": "ple", "w_proj": "w_proj", "h": "i", "y": "j"}),
    ("add_rmsnorm", {"a": "j", "residual": "e", "w_post": "w_post_own", "w_next": "w_next", "sum": "s", "y": "y"}),
    QUERIES,
)
TAKEN = ("qkv", "w_q_norm", "w_k_norm", "rope", "positions", "slots", "block_table", "k_cache", "v_cache")
ATTENTION = ("decode_attention", {**{name: name for name in TAKEN}, "o": "attended"})
# the end of a layer with AltUp streams, and the next layer's prediction
STREAM_STEPS = (
    ("altup_add", {"corrected": "c", "a": "j", "w_post": "w_post", "streams": "s"}),
    (
        "altup_predict",
        {
            "streams": "s",
            "w_router_norm": "w_router_norm",
            "w_router": "w_router",
            "w_predict": "w_predict",
            "w_norm": "w_norm",
            "predicted": "p",
            "normed": "n",
            "y": "y",
        },
    ),
)
# a layer's AltUp correction, and its per-layer input
GATE_STEPS = (
    (
        "altup_correct",
        {
            "a": "m",
            "residual": "r",
            "w_post": "w_post",
            "predicted": "p",
            "w_router_norm": "w_router_norm",
            "w_router": "w_router",
            "w_correct": "w_correct",
            "w_scale": "w_scale",
            "corrected": "c",
            "y": "g",
        },
    ),
    ("per_layer_input", {"x": "g", "w_gate": "w_gate", "ple": "ple", "w_proj": "w_proj", "h": "i", "y": "j"}),
)
# the choice of a row's experts, the order of rows by expert, and their norms in it
ROUTE_STEPS = (
    ("top_experts", {"logits": "logits", "expert_scale": "scales", "experts": "experts", "gates": "gates"}),
    ("group_experts", {"experts": "experts", "places": "places", "order": "order", "spans": "spans", "pairs": "pairs"}),
    ("expert_rows", {"x": "r", "w": "w_experts", "places": "places", "y": "ex"}),
)
# a row's sum and norm, and its experts' logits
ADD_ROUTER_STEPS = (
    ("add_rmsnorm", {"a": "a", "residual": "x", "w_post": "w_post", "w_next": "w_next", "sum": "r", "y": "z"}),
    ("router", {"x": "r", "scale": "w_scale", "w": "w_router", "logits": "logits"}),
)
# a product and the step that adds its partials
LAUREL = (
    "laurel_add",
    {
        "a": "a",
        "laurel": "l",
        "predicted": "p",
        "normed": "n",
        "w_post": "w_post",
        "w_laurel": "w_laurel",
        "w_next": "w_next",
        "sum": "s",
        "y": "y",
    },
)
SUM_STEPS = (
    STEPS[:2],
    STEPS[2:4],
    OWN_STEPS[2:4],
    (STEPS[0], LAUREL),
    (STEPS[2], GATE_STEPS[0]),
    STEPS[1:2],
    OWN_STEPS[3:4],
    (LAUREL,),
    GATE_STEPS[:1],
)
CHAINS = {
    tuple(op for op, _ in steps): steps
    for steps in (
        STEPS,
        STEPS[:-1],
        OWN_STEPS,
        OWN_STEPS[:-1],
        STREAM_STEPS,
        GATE_STEPS,
        ROUTE_STEPS,
        ADD_ROUTER_STEPS,
        (*STEPS, ATTENTION),
        (*OWN_STEPS, ATTENTION),
        *SUM_STEPS,
        (STEPS[4], ATTENTION),
        (QUERIES, ATTENTION),
        (ATTENTION,),
    )
}
