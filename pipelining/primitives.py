"""What the compiler knows of JAX's primitives by name: which only move data, which are cheap to repeat, which add.

Used by the passes to decide what may be hoisted, recomputed or regrouped.  A primitive that is not listed is treated
as expensive and opaque: the program stays right, it only moves more.
"""

from stagewright.pipelining.graph import Operation, Value

MOVEMENT = frozenset(
    {
        "bitcast_convert_type",
        "broadcast_in_dim",
        "concatenate",
        "convert_element_type",
        "copy",
        "copy_p",
        "expand_dims",
        "random_unwrap",
        "random_wrap",
        "reshape",
        "rev",
        "shard",
        "sharding_constraint",
        "slice",
        "split",
        "squeeze",
        "stack",
        "transpose",
        "unstack",
    }
)

ELEMENTWISE = frozenset(
    {
        "abs", "add", "add_any", "and", "clamp", "cos", "div", "eq", "exp", "exp2", "floor", "ge", "gt", "integer_pow",
        "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not",
        "one_minus_square", "or", "pow", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
        "shift_right_logical", "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tanh", "xor",
    }
)  # fmt: skip

# Cheap for any size: they cost no more than reading what they make.
CHEAP = MOVEMENT | ELEMENTWISE | {"iota"}

# Cheap only for small arrays: random keys, small reductions.
SMALL = 4096

# Never cheap: the model's own work, however small.  To do it again elsewhere would take its parameters there.
WORK = frozenset({"cond", "conv_general_dilated", "dot_general", "gather", "scan", "while"})

ADD = frozenset({"add", "add_any"})

# Linear in their one array operand, and the same for each term of a sum.
LINEAR = frozenset(
    {
        "convert_element_type",
        "copy",
        "expand_dims",
        "neg",
        "reshape",
        "shard",
        "sharding_constraint",
        "squeeze",
        "transpose",
    }
)


def only_moves(op: Operation) -> bool:
    """Whether the operation computes nothing and makes nothing larger than what it reads."""
    if op.operator.name not in MOVEMENT or not op.values_in:
        return False
    return sum(v.nbytes for v in op.outputs) <= sum(v.nbytes for v in op.values_in)


def copies(op: Operation) -> bool:
    """Whether a data movement costs a pass over memory wherever it stands: a join, or a cast."""
    return op.operator.name in ("concatenate", "convert_element_type", "stack")


def is_cheap(op: Operation) -> bool:
    """Whether doing the operation again costs less than sending its result."""
    if op.operator.name in CHEAP:
        return True
    if op.has_effects:
        return False
    small = max((v.size for v in (*op.outputs, *op.values_in)), default=0) <= SMALL
    return small and op.operator.name not in WORK


def is_sum(op: Operation) -> bool:
    """Whether the operation adds two arrays of one shape."""
    shapes = {atom.shape for atom in op.inputs}
    return (
        op.operator.name in ADD
        and len(shapes) == 1
        and all(isinstance(a, Value) for a in op.inputs)
    )
