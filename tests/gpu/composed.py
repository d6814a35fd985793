"""Algorithms without a name that are tried as those with one are."""

from bagua.algorithms import Algorithm

COMPOSED = {
    "minmax_u4": Algorithm(codec="minmax_u4"),
    "sign1": Algorithm(codec="sign1"),
    "sparse": Algorithm(codec="topk", density=0.1, error_feedback=True),
    "dense": Algorithm(codec="topk", density=0.9, error_feedback=True),
    "peers": Algorithm(what="weight", peers="shift_one", when="step"),
    "exponential": Algorithm(what="weight", peers="exponential", when="step"),
    "ring": Algorithm(what="weight", peers="ring", when="forward"),
    # Neighbors that keep copies of each other, also inside one machine.
    "mirrored": Algorithm(what="weight", peers="ring", when="step", codec="minmax_u8"),
}
