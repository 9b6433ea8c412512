"""`simctl models`, `gpus` and `policies`: what is built in, with sources."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from sim.cli.tables import table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def models(as_json: bool) -> None:
    """List the built-in models: parameters in all and those that one token passes through.

    A name that ends in -fp8 is the model with e4m3 weights.

    Example: simctl models --json
    """
    from sim.cost.model import list_models

    specs = list_models()
    if as_json:
        rows = [
            {
                **asdict(spec),
                "params": spec.params(),
                "active_params": spec.active_params(),
                "weight_bytes": spec.weight_bytes(),
                "kv_bytes_per_token": spec.kv_bytes_per_token(),
            }
            for spec in specs
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    header = (
        "MODEL",
        "PARAMS",
        "ACTIVE",
        "LAYERS",
        "HIDDEN",
        "HEADS",
        "KV HEADS",
        "FFN",
        "EXPERTS",
        "KV B/TOKEN",
        "CONTEXT",
        "SOURCE",
    )
    listed = [
        (
            spec.name,
            f"{spec.params() / 1e9:.1f}B",
            f"{spec.active_params() / 1e9:.1f}B",
            spec.layers,
            spec.hidden,
            spec.q_heads,
            spec.kv_heads,
            spec.ffn,
            f"{spec.experts_per_token} of {spec.experts}" if spec.experts else "-",
            spec.kv_bytes_per_token(),
            spec.max_context,
            spec.source,
        )
        for spec in specs
    ]
    click.echo(table(header, listed))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def gpus(as_json: bool) -> None:
    """List the built-in GPUs: dense peak rates, memory as a program sees it.

    Example: simctl gpus
    """
    from sim.cost.gpu import list_gpus

    specs = list_gpus()
    if as_json:
        click.echo(json.dumps([asdict(spec) for spec in specs], indent=2))
        return
    header = ("GPU", "SMS", "BF16 TFLOP/S", "HBM GIB", "GB/S", "L2 MIB", "NVLINK GB/S", "TDP W", "SOURCE")
    listed = [
        (
            spec.name,
            spec.sms,
            spec.bf16_tflops,
            round(spec.hbm_bytes / 2**30, 1),
            spec.hbm_gb_s,
            spec.l2_bytes // 2**20,
            spec.nvlink_gb_s,
            spec.tdp_w,
            spec.source,
        )
        for spec in specs
    ]
    click.echo(table(header, listed))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, knobs included.")
def policies(as_json: bool) -> None:
    """List the serving policies and presets with their sources.

    Example: simctl policies --json
    """
    from sim.policies import list_policies

    infos = list_policies()
    if as_json:
        rows = [
            {
                "name": info.name,
                "base": info.base,
                "source": info.source,
                "mirrors": info.mirrors,
                "knobs": {name: asdict(knob) for name, knob in info.knobs.items()},
            }
            for info in infos
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    listed = [(info.name, info.base or "-", info.mirrors, info.source) for info in infos]
    click.echo(table(("POLICY", "PRESET OF", "MIRRORS", "SOURCE"), listed))
