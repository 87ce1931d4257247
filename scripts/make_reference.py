#!/usr/bin/env python3
"""Makes references with PyTorch and transformers, the judge of `train_gpt --verify`.

Without --data: one folder in the format below, everything in float64. Without exceptions: the
library rounds to float32 inside RMSNorm, the softmax and the RoPE angles even for a float64 model,
so its code runs here with float32 standing for float64 (see exact()).
  config.json, model.safetensors   Hugging Face layout, fp32 weights
  reference.safetensors            input_ids, targets (B,T) int64, targets shifted, -100 = ignored;
                                   document_ids (B,T) with --documents; position_ids (B,T) with
                                   --reset-positions; fp64 logits (B,T,V), loss (1), grad.<name>,
                                   losses (N), grad_norms (N), after.<name>: weights after N steps
  reference.json                   optimizer, what made it, and how wrong plain bf16 and fp16 are
With --data SHARD: trains on consecutive sequences of a token shard in --dtype and writes the same
weights plus curve.jsonl, one line a step, to lay beside train_gpt's log:
  train_gpt --model DIR --data SHARD --shuffle off --lr-schedule constant ...
With --check DIR: recomputes a reference from its weights and inputs and prints the differences.
With --add-errors DIR: runs a reference in bf16 and fp16 and notes the errors in its reference.json.

Needs torch, transformers 5 and safetensors:
  python3 scripts/make_reference.py --model qwen2 --tied --width 40 --heads 5 --kv-heads 1 \\
      --seq 37 --vocab 301 --targets one --output /tmp/qwen2-one
"""
import argparse
import contextlib
import json
import os
import sys

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

IGNORED = -100


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--output", metavar="DIR")
    p.add_argument("--check", metavar="DIR")
    p.add_argument("--add-errors", metavar="DIR")
    model = p.add_argument_group("model")
    model.add_argument("--model", choices=["gpt2", "llama", "qwen2"], default="gpt2")
    model.add_argument("--layers", type=int, default=2)
    model.add_argument("--width", type=int, default=64, help="channels C")
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--kv-heads", type=int, help="default: --heads")
    model.add_argument("--head-dim", type=int, help="llama; default: width / heads")
    model.add_argument("--ffn", type=int, help="default: 4 C, or 8/3 C for llama and qwen2")
    model.add_argument("--vocab", type=int, default=512)
    model.add_argument("--positions", type=int, help="default: --seq")
    model.add_argument("--tied", action="store_true", help="gpt2 always is")
    model.add_argument("--rope-theta", type=float, default=10000.0)
    model.add_argument("--rope-scaling", choices=["none", "linear", "llama3"], default="none")
    model.add_argument("--rope-factor", type=float, default=4.0)
    model.add_argument("--rope-original", type=int, default=16,
                       help="llama3: original_max_position_embeddings")
    data = p.add_argument_group("data")
    data.add_argument("--batch", type=int, default=2)
    data.add_argument("--seq", type=int, default=48)
    data.add_argument("--targets", choices=["full", "masked", "one"], default="full",
                      help="all targets, about three quarters of them, or a single one")
    data.add_argument("--documents", action="store_true", help="pack documents of random lengths")
    data.add_argument("--reset-positions", action="store_true",
                      help="with --documents: positions start again in each document")
    data.add_argument("--data", metavar="SHARD", help="token shard of llm.c's format")
    opt = p.add_argument_group("training")
    opt.add_argument("--steps", type=int, help="default: 10, or 200 with --data")
    opt.add_argument("--lr", type=float, default=1e-3)
    opt.add_argument("--weight-decay", type=float, default=0.1)
    opt.add_argument("--grad-clip", type=float, default=1.0)
    opt.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16", help="with --data")
    opt.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                     help="with --data")
    opt.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    if sum(map(bool, (a.output, a.check, a.add_errors))) != 1:
        p.error("give one of --output, --check and --add-errors")
    if a.reset_positions and not a.documents:
        p.error("--reset-positions needs --documents")
    if a.data and (a.documents or a.targets != "full"):
        p.error("--documents and --targets are for references without --data")
    if a.steps is None:
        a.steps = 200 if a.data else 10
    return a


# --- the model -----------------------------------------------------------------------------------
def make_config(a):
    common = dict(vocab_size=a.vocab, bos_token_id=0, eos_token_id=0)
    positions = a.positions or a.seq
    if a.model == "gpt2":
        return transformers.GPT2Config(
            n_embd=a.width, n_layer=a.layers, n_head=a.heads, n_positions=positions, n_inner=a.ffn,
            attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, **common)
    rope = {"rope_type": "default", "rope_theta": a.rope_theta}
    if a.rope_scaling == "linear":
        rope.update(rope_type="linear", factor=a.rope_factor)
    if a.rope_scaling == "llama3":
        rope.update(rope_type="llama3", factor=a.rope_factor, low_freq_factor=1.0,
                    high_freq_factor=4.0, original_max_position_embeddings=a.rope_original)
    common.update(
        hidden_size=a.width, num_hidden_layers=a.layers, num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads or a.heads, max_position_embeddings=positions,
        intermediate_size=a.ffn or (8 * a.width // 3 + 7) // 8 * 8, rope_parameters=rope,
        tie_word_embeddings=a.tied)
    if a.model == "qwen2":
        return transformers.Qwen2Config(**common)
    if a.head_dim:
        common["head_dim"] = a.head_dim
    return transformers.LlamaConfig(attention_bias=False, mlp_bias=False, **common)


@contextlib.contextmanager
def exact():
    """Inside, whatever the library calls float32 is float64, so that nothing is rounded."""
    saved = torch.float32, torch.float, torch.Tensor.float, torch.get_default_dtype()
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = saved[:3]
        torch.set_default_dtype(saved[3])


def build(config, dtype):
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    return model.train()  # no dropout in these configurations; training mode as in training


def randomize(model, seed):
    """Initial weights: the library's, with biases and norms moved off 0 and 1 so that they count."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() < 2:
                p.add_(0.1 * torch.randn(p.shape, generator=g, dtype=torch.float64))
            p.copy_(torch.from_numpy(as_fp32(p)))  # what model.safetensors holds, exactly


def as_fp32(p):
    return p.detach().cpu().double().numpy().astype(np.float32)


def save_model(model, folder):
    os.makedirs(folder, exist_ok=True)
    config = model.config
    config.dtype = "float32"
    config.save_pretrained(folder)
    weights = {n: torch.from_numpy(as_fp32(p)) for n, p in model.named_parameters()}
    save_file(weights, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})


# --- data ----------------------------------------------------------------------------------------
def make_batch(a):
    rng = np.random.default_rng(a.seed)
    tokens = rng.integers(0, a.vocab, (a.batch, a.seq + 1))
    targets = tokens[:, 1:].copy()
    if a.targets == "masked":
        targets[rng.random(targets.shape) < 0.25] = IGNORED
    if a.targets == "one":
        keep = (a.batch - 1, a.seq // 2)
        only = targets[keep]
        targets[:] = IGNORED
        targets[keep] = only
    batch = {"input_ids": tokens[:, :-1].copy(), "targets": targets}
    if a.documents:
        # Lengths 1 to about a third of the sequence; a new document begins in every sequence.
        starts = rng.random((a.batch, a.seq)) < 6.0 / a.seq
        starts[:, 0] = True
        if a.seq > 3:
            starts[0, 1] = starts[0, 2] = True  # documents of one token
        ids = np.cumsum(starts.reshape(-1)).reshape(a.batch, a.seq) - 1
        batch["document_ids"] = ids
        if a.reset_positions:
            first = np.maximum.accumulate(np.where(starts, np.arange(a.seq), 0), axis=1)
            batch["position_ids"] = np.arange(a.seq) - first
    return {k: torch.from_numpy(v.astype(np.int64)) for k, v in batch.items()}


def read_shard(path):
    """Tokens of a .bin shard of llm.c: 256 int32 of header, then uint16 or uint32 tokens."""
    header = np.fromfile(path, dtype="<i4", count=256)
    kinds = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
    kind = kinds.get(tuple(int(x) for x in header[:2]))
    if kind is None:
        sys.exit(f"error: {path}: header {header[:2].tolist()} is not that of a token shard")
    tokens = np.memmap(path, dtype=kind, mode="r", offset=1024)
    if len(tokens) != header[2]:
        sys.exit(f"error: {path}: {len(tokens)} tokens, but its header says {header[2]}")
    return tokens


# --- training ------------------------------------------------------------------------------------
def make_optimizer(model, opt):
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": opt["weight_decay"]},
              {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=opt["lr"], betas=tuple(opt["betas"]), eps=opt["eps"])


def forward(model, batch):
    """Logits and the mean loss over the valid targets."""
    kwargs = {}
    if "position_ids" in batch:
        kwargs["position_ids"] = batch["position_ids"]
    if "document_ids" in batch:
        d = batch["document_ids"]
        T = d.shape[1]
        causal = torch.ones(T, T, dtype=torch.bool).tril()
        kwargs["attention_mask"] = ((d[:, :, None] == d[:, None, :]) & causal)[:, None]
    logits = model(input_ids=batch["input_ids"], use_cache=False, **kwargs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(),
                                             ignore_index=IGNORED)
    return logits, loss


def train_exactly(model, batch, opt, steps):
    """The reference's tensors. `model` is left with the weights after `steps` steps."""
    optimizer = make_optimizer(model, opt)
    out, losses, norms = {}, [], []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        logits, loss = forward(model, batch)
        loss.backward()
        if step == 0:
            out["logits"] = logits.detach().clone()
            out["loss"] = loss.detach().reshape(1)
            for name, p in model.named_parameters():
                out["grad." + name] = p.grad.clone()
        losses.append(loss.item())
        limit = opt["grad_clip"] if opt["grad_clip"] > 0 else float("inf")
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
    out["losses"] = torch.tensor(losses, dtype=torch.float64)
    out["grad_norms"] = torch.tensor(norms, dtype=torch.float64)
    for name, p in model.named_parameters():
        out["after." + name] = p.detach().clone()
    rounded = [k for k, v in out.items() if v.dtype != torch.float64]
    assert not rounded, f"not in float64: {rounded}"
    return {k: v.contiguous() for k, v in out.items()}


def optimizer_of(a):
    return {"name": "adamw", "lr": a.lr, "betas": [0.9, 0.95], "eps": 1e-8,
            "weight_decay": a.weight_decay, "decay": "tensors of two or more dimensions",
            "grad_clip": a.grad_clip}


def make_reference(a):
    torch.manual_seed(a.seed)
    opt, batch = optimizer_of(a), make_batch(a)
    with exact():
        model = build(make_config(a), torch.float64)
        randomize(model, a.seed)
        save_model(model, a.output)
        out = train_exactly(model, batch, opt, a.steps)
    save_file({**batch, **out}, os.path.join(a.output, "reference.safetensors"))
    made_with = f"torch {torch.__version__}, transformers {transformers.__version__}, float64"
    with open(os.path.join(a.output, "reference.json"), "w") as f:
        json.dump({"optimizer": opt, "steps": a.steps, "made_with": made_with}, f, indent=1)
        f.write("\n")
    add_plain_errors(a.output)
    print(f"{a.output}: loss {out['losses'][0]:.6f} -> {out['losses'][-1]:.6f} in {a.steps} steps")


def open_reference(folder):
    """Its reference.json, all its tensors, and the batch among them."""
    with open(os.path.join(folder, "reference.json")) as f:
        about = json.load(f)
    saved = load_file(os.path.join(folder, "reference.safetensors"))
    inputs = ("input_ids", "targets", "position_ids", "document_ids")
    return about, saved, {k: saved[k] for k in inputs if k in saved}


def load_model(folder, dtype):
    model = build(AutoConfig.from_pretrained(folder), dtype)
    weights = load_file(os.path.join(folder, "model.safetensors"))
    missing, unexpected = model.load_state_dict({k: v.to(dtype) for k, v in weights.items()},
                                                strict=False)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert set(missing) <= tied and not unexpected, (missing, unexpected)
    return model


def train_plainly(folder, batch, opt, steps, dtype, scale):
    """What train_exactly gives, from a model whose weights and activations are `dtype`, with fp32
    master weights and a fixed loss scale: the plain implementation that `train_gpt` may be at most
    two or three times as wrong as."""
    master = load_model(folder, torch.float32)
    model = load_model(folder, dtype)
    optimizer = make_optimizer(master, opt)
    pairs = list(zip(master.parameters(), model.parameters()))
    out, losses, norms = {}, [], []
    for step in range(steps):
        model.zero_grad(set_to_none=True)
        logits, _ = forward(model, batch)
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED)
        (loss * scale).backward()
        for full, low in pairs:
            full.grad = low.grad.float() / scale
        if step == 0:
            out["logits"], out["loss"] = logits.detach(), loss.detach().reshape(1)
            out.update({"grad." + n: p.grad.clone() for n, p in master.named_parameters()})
        losses.append(loss.item())
        limit = opt["grad_clip"] if opt["grad_clip"] > 0 else float("inf")
        norms.append(torch.nn.utils.clip_grad_norm_(master.parameters(), limit).item())
        optimizer.step()
        with torch.no_grad():
            for full, low in pairs:
                low.copy_(full)
    out["losses"], out["grad_norms"] = torch.tensor(losses), torch.tensor(norms)
    out.update({"after." + n: p.detach().clone() for n, p in master.named_parameters()})
    return out


# A scale that is no power of two rounds every gradient anew. Where a gradient nearly vanishes, AdamW
# takes a step of full size in the direction of its rounding error: one run in 16 bits says little
# about the weights after it. Of runs that differ in rounding alone the worst errs up to 14 times as
# much as the first.
PLAIN_SCALES = (1024.0, 1000.0, 900.0, 1300.0)


def add_plain_errors(folder):
    """reference.json gets plain_error.<dtype>.<tensor>: relative L2 norms, of several runs the
    worst."""
    about, saved, batch = open_reference(folder)
    about["plain_error"] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        runs = [train_plainly(folder, batch, about["optimizer"], about["steps"], dtype, scale)
                for scale in PLAIN_SCALES]
        about["plain_error"][name] = {
            k: float("%.3e" % max(((out[k].double() - saved[k]).norm() / saved[k].norm()).item()
                                  for out in runs)) for k in runs[0]}
    with open(os.path.join(folder, "reference.json"), "w") as f:
        json.dump(about, f, indent=1)
        f.write("\n")


def check_reference(folder):
    about, saved, batch = open_reference(folder)
    with exact():
        model = load_model(folder, torch.float64)
        out = train_exactly(model, batch, about["optimizer"], about["steps"])
    worst = 0.0
    for kind in ("logits", "loss", "losses", "grad_norms", "grad.", "after."):
        names = [k for k in out if k == kind or (kind[-1] == "." and k.startswith(kind))]
        off = max(((out[k] - saved[k]).norm() / saved[k].norm().clamp(min=1e-300)).item()
                  for k in names)
        print(f"{kind.rstrip('.'):12} {off:.1e}")
        worst = max(worst, off)
    if worst > 1e-10:
        sys.exit(f"error: {folder} differs from what this PyTorch computes")


def train_curve(a):
    torch.manual_seed(a.seed)
    tokens = read_shard(a.data)
    sequences = (len(tokens) - 1) // a.seq
    if sequences < a.batch:
        sys.exit(f"error: {a.data}: {len(tokens)} tokens make {sequences} sequences of {a.seq}")
    model = build(make_config(a), torch.float32)
    save_model(model, a.output)
    model.to(a.device)
    optimizer = make_optimizer(model, optimizer_of(a))
    cast = torch.autocast(a.device.split(":")[0], dtype=torch.bfloat16, enabled=a.dtype == "bf16")
    limit = a.grad_clip if a.grad_clip > 0 else float("inf")
    with open(os.path.join(a.output, "curve.jsonl"), "w") as log:
        for step in range(a.steps):
            rows = [(step * a.batch + b) % sequences * a.seq for b in range(a.batch)]
            window = np.stack([tokens[r:r + a.seq + 1].astype(np.int64) for r in rows])
            window = torch.from_numpy(window).to(a.device)
            optimizer.zero_grad(set_to_none=True)
            with cast:
                logits = model(input_ids=window[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1),
                                                     window[:, 1:].flatten())
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            record = {"step": step + 1, "loss": loss.item(), "grad_norm": norm.item(), "lr": a.lr,
                      "tokens": (step + 1) * a.batch * a.seq}
            log.write(json.dumps(record) + "\n")
            log.flush()
            if (step + 1) % 10 == 0:
                print(f"step {step + 1}/{a.steps}: loss {record['loss']:.4f}", flush=True)


def main():
    a = parse_arguments()
    torch.backends.cuda.matmul.allow_tf32 = False
    if a.check:
        check_reference(a.check)
    elif a.add_errors:
        add_plain_errors(a.add_errors)
    elif a.data:
        train_curve(a)
    else:
        make_reference(a)


if __name__ == "__main__":
    main()
