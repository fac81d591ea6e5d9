"""`sordino generate`: synthetic texts from a fine-tuned causal model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sordino.cli import early, options
from sordino.cli.terminal import console, print_json
from sordino.errors import InvalidInput

EPILOG = """
[bold]Examples[/bold]

sordino generate runs/20260101-120000 --records 1000 --out synthetic.jsonl

sordino generate runs/20260101-120000 --records 20 --out letters.jsonl --prompt "Dear" --temperature 0.8 --seed 1
"""
_Run = Annotated[Path, typer.Argument(help="A run of `sordino finetune --task causal-lm`; nothing in it is changed.")]
_Records = Annotated[int, typer.Option(help="How many texts.")]
_Out = Annotated[Path, typer.Option(help="The .jsonl file; the guarantee is written beside it.")]
_Prompt = Annotated[str, typer.Option(help="What every text begins with; it must not be private.")]
_Temperature = Annotated[float, typer.Option(help="1 samples as the model was trained; less is more cautious.")]
_TopP = Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens whose chances add up to this.")]
_Length = Annotated[int | None, typer.Option(help="The most tokens of a text. Default: as in training.")]
_Seed = Annotated[int | None, typer.Option(help="Make the texts repeatable.")]


def generate(
    run: _Run,
    out: _Out,
    records: _Records = 100,
    prompt: _Prompt = "",
    temperature: _Temperature = 1.0,
    top_p: _TopP = 1.0,
    length: _Length = None,
    seed: _Seed = None,
    json: options.Json = False,
) -> None:
    """Write synthetic texts as JSON lines. They come from the released model alone, so any number of them is free."""
    early.require_directory(run)
    options.require_numbers({"records": records})
    from dataclasses import asdict
    from json import dumps

    from sordino.cli.progress import open_bar
    from sordino.finetuning.choice import CAUSAL
    from sordino.finetuning.generating import Sampling
    from sordino.finetuning.generating import generate as write
    from sordino.finetuning.stamping import describe_guarantee, find_stamp, write_stamp
    from sordino.finetuning.tuned import load_tuned

    sampling = Sampling(temperature, top_p, length, seed)
    for path in (out, find_stamp(out)):
        if path.exists():
            raise InvalidInput(f"{path} exists already: choose another file")
    tuned = load_tuned(run, CAUSAL)
    stamp = describe_guarantee(
        run, "synthetic texts", records=records, prompt=prompt, sampling=asdict(sampling), file=out.name
    )
    partial = out.with_name(out.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file, open_bar("synthetic texts") as progress:
            task = progress.add_task("", total=records, note="")
            for texts in write(tuned, records, sampling, prompt):
                file.writelines(dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
                progress.advance(task, len(texts))
        write_stamp(out, stamp)  # first, so that there are never texts without their guarantee
        partial.replace(out)
    except OSError as error:
        raise InvalidInput(f"cannot write {out}: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)
    if json:
        print_json({"out": str(out), "stamp": str(find_stamp(out)), **stamp})
        return
    console().print(
        f"Wrote {records:,} synthetic texts to {out}; their guarantee is in {find_stamp(out)}", markup=False
    )
    console().print(f"Guarantee. {stamp['in_words'].splitlines()[0]}", markup=False)
