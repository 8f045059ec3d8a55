"""Compile every kernel for GPUs that this computer lacks, and print their register and memory use.

`python -m tests.support.compile_kernels 80 90 --only AdamW` compiles only AdamW's kernels for these
two targets. Each line of the output is JSON. `--update` writes each kernel's register count and
stack size to RECORD, which a test reads. Each version of Triton has its own file.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import torch

if True:  # import Triton only after changing the environment variable
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

from hotrow import optim
from hotrow.kernels.program import REPLAY, SKIP_IDLE_STEPS, Program
from hotrow.kernels.triton import rows
from hotrow.kernels.triton.operators import AHEAD, block_options, kernel_options

TARGETS = 80, 89, 90, 100
# Each version of Triton has its own assembler, which assigns registers differently.
VERSION = ".".join(triton.__version__.split(".")[:2])
RECORD = Path(__file__).parents[1] / "kernels" / "triton" / f"registers-{VERSION}.json"
OPTIMIZERS = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {"weight_decay": 0.1, "maximize": True}),
    ("AdamW", {}),
    ("AdamW", {"amsgrad": True}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("Adamax", {}),
    ("Adagrad", {}),
    ("Adadelta", {}),
    ("RMSprop", {}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("ASGD", {}),
    ("Rprop", {}),
]
JOINED = "SGD", "AdamW"  # compile the step of several tables only for these optimizers
DTYPES = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}
POINTERS = {
    "row_steps": "*i32", "ids": "*i32", "order": "*i64", "clock": "*i32", "numbers": "*fp64",
    "bad_id": "*i64", "has_bad_id": "*i32", "batch": "*i32", "rows": "*i64",
    "addresses": "*i64", "table_count": "i32", "number": "i32", "count": "i32", "columns": "i32",
}  # fmt: skip
VALUES = "table", "output", "grads", "sums", "values"  # tensors in the table's dtype
ALIGNED = {*VALUES, "entries", "numbers", "order", "columns"}


def make_program(name, options):
    """Return the program of an optimizer's rule with its closed form, and the number of slots."""
    optimizer = getattr(optim, name)([torch.nn.Parameter(torch.zeros(2, 2))], **options)
    group, rule = dict(optimizer.param_groups[0]), optimizer.rule
    scalars = rule.initial_scalars(group, {})
    width = len(rule.ledger_entry(group, 1, scalars))
    closed_form = rule.closed_form(group)
    fast_forward = REPLAY if closed_form is None else closed_form.fast_forward
    if rule.idle_rows_unchanged(group):
        fast_forward = SKIP_IDLE_STEPS
    return Program(rule.update, rule.flags(group), width, fast_forward), len(
        rule.initial_slots(group)
    )


def array_types(form):
    """Return the types of a closed form's arrays."""
    arrays = {"series": ("*fp64",), "linear": ("*fp64", "*i64"), "infinity norm": ("*fp64",)}
    return arrays.get(form, ())


def compile_kernel(kernel, constants, slot_count, form, dtype, target, columns):
    """Compile a kernel, and return its register and memory use."""
    item, entry = f"*{DTYPES[dtype]}", "*fp64" if dtype == "float64" else "*fp32"
    options = block_options(columns)
    warps = options.pop("num_warps")
    constants = {"pitch": None, **constants, **options}
    fusion = constants.pop("enable_fp_fusion")
    if columns == 1:  # Triton treats an argument that is 1 as a constant
        constants["columns"] = 1
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    types = {**POINTERS, **dict.fromkeys(VALUES, item), "entries": entry}
    if kernel.__name__ in ("look_up", "step"):
        types["rows"] = "i32"
    elif kernel.__name__ == "merge":
        types["rows"] = "*i32"
    if kernel.__name__ == "look_up":
        types["ids"] = "*i64"
    types |= {"slots": (item,) * slot_count, "arrays": array_types(form), "scales": entry}
    signature = {
        name: "constexpr" if name in constants else types[name] for name in kernel.arg_names
    }
    aligned = [["tt.divisibility", 16]]
    names = ALIGNED - constants.keys()
    attributes = {(i,): aligned for i, name in enumerate(kernel.arg_names) if name in names}
    for name in ("slots", "arrays"):
        if name in kernel.arg_names:
            position = kernel.arg_names.index(name)
            attributes |= {(position, k): aligned for k in range(len(types[name]))}
    positions = {kernel.arg_names.index(name): value for name, value in constants.items()}
    compiled = triton.compile(
        ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={(position,): value for position, value in positions.items()},
            attrs=attributes,
        ),
        target=GPUTarget("cuda", target, 32),
        options={"enable_fp_fusion": fusion, "num_warps": warps},
    )
    ptx = compiled.asm["ptx"]
    return {
        **resources(compiled.asm["cubin"]),
        "shared": compiled.metadata.shared,
        "approximate": sorted(set(re.findall(r"(?:div\.full|sqrt\.approx)[a-z.0-9]*", ptx))),
        "barriers": len(re.findall(r"\bbar(?:rier)?(?:\.cta)?\.sync", ptx)),
        "fused": sorted(set(re.findall(r"mad\.[a-z.]*f(?:32|64)", ptx))),
    }


def resources(cubin):
    """Return how many registers and bytes of stack and local memory a thread uses."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return {
        "registers": int(found["REG"]),
        "stack": int(found["STACK"]),
        "local": int(found["LOCAL"]),
    }


def compile_all(targets, only, dtypes, columns):
    """Yield a record for each kernel, optimizer, dtype and target."""
    for target in targets:
        for dtype in dtypes:
            for kernel in (rows.sum_chunks, rows.merge):
                for settings in ({"scales": None}, {}) if only is None else ():
                    constants = {"AHEAD": AHEAD, **settings}
                    yield record(kernel, "", {}, constants, 0, "", dtype, target, columns)
            for name, options in OPTIMIZERS:
                if only is not None and name not in only:
                    continue
                program, slot_count = make_program(name, options)
                constants = {
                    **kernel_options(program), "AHEAD": AHEAD, "ROWS": 16, "HAS_ROWS": False,
                }  # fmt: skip
                one_table = constants | {"addresses": None, "table_count": 1}
                form = program.fast_forward.form
                kernels = [(rows.look_up, constants), (rows.step, one_table)]
                kernels += [(rows.settle, constants)]
                if name in JOINED:
                    kernels += [(rows.step, constants)]
                for kernel, chosen in kernels:
                    yield record(
                        kernel, name, options, chosen, slot_count, form, dtype, target, columns
                    )


def record(kernel, name, options, constants, slot_count, form, dtype, target, columns):
    """Compile a kernel and return a record of it."""
    title = kernel.__name__
    if title == "step" and "addresses" not in constants:
        title = "step of several tables,"
    if title in ("sum_chunks", "merge") and "scales" not in constants:
        title += " with scales"
    begin = time.perf_counter()
    found = compile_kernel(kernel, constants, slot_count, form, dtype, target, columns)
    settings = ",".join(f"{option}={value}" for option, value in options.items())
    key = f"sm_{target} {dtype} {title} {name} {settings}".strip()
    seconds = round(time.perf_counter() - begin, 2)
    return {"key": key, "columns": columns, **found, "seconds": seconds}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", type=int, nargs="*", default=TARGETS)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--columns", type=int, default=256)
    parser.add_argument("--update", action="store_true")
    arguments = parser.parse_args()
    limits = {}
    for each in compile_all(arguments.targets, arguments.only, arguments.dtypes, arguments.columns):
        print(json.dumps(each), flush=True)
        limits[each["key"]] = [each["registers"], each["stack"]]
    if arguments.update:
        old = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted((old | limits).items())]
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
