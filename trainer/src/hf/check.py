"""Opens an exported folder in transformers and compares its logits with ours; then generates.

    python check.py DIR IDS LOGITS [--text TEXT]

DIR is what `ztrain export --format hf` wrote, IDS a JSON list of token ids (one document), LOGITS our logits for them as
little-endian f32. Exit code 0: the logits agree within 1e-4 of their length, and the loss of every token within 1e-5;
1: they do not; 77: transformers or torch cannot be had here.
"""

import json
import pathlib
import sys

try:
    import torch
    import transformers
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
except ImportError as error:
    print(f"transformers cannot be had: {error}")
    sys.exit(77)

BOUND = 1e-4
LOSS_BOUND = 1e-5


def main(folder, ids, logits, text=None):
    torch.set_num_threads(1)
    described = json.loads((pathlib.Path(folder) / "config.json").read_text())
    if described["model_type"] not in CONFIG_MAPPING:
        print(f"transformers {transformers.__version__} has no {described['model_type']}")
        sys.exit(77)
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert [type(model).__name__] == described["architectures"], type(model)
    odd = {key: value for key, value in report.items() if value}
    assert not odd, f"tensors without a place, or places without a tensor: {odd}"
    ids = torch.tensor([json.loads(pathlib.Path(ids).read_text())])
    with torch.no_grad():
        theirs = model(input_ids=ids, use_cache=False).logits[0]
    ours = torch.frombuffer(bytearray(pathlib.Path(logits).read_bytes()), dtype=torch.float32).view(theirs.shape)
    apart = ((ours - theirs).norm() / theirs.norm()).item()
    losses = [torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none") for logits in (ours, theirs)]
    most = (losses[0] - losses[1]).abs().max().item()
    print(f"{described['model_type']} of transformers {transformers.__version__}, torch {torch.__version__}: "
          f"{tuple(theirs.shape)} logits, |a - b| / |b| = {apart:.1e}; largest difference of a token's loss {most:.1e}")
    assert apart <= BOUND, f"more than {BOUND} apart"
    assert most <= LOSS_BOUND, f"losses are more than {LOSS_BOUND} apart"
    # Greedy generation reads its own cache of keys, convolutions and delayed values.
    made = model.generate(ids[:, :4], max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)[0]
    with torch.no_grad():
        again = model(input_ids=made[None, :-1], use_cache=False).logits[0].argmax(-1)
    print("generated", made.tolist())
    assert made.tolist()[4:] == again.tolist()[3:] , "generation and the forward pass disagree"
    if text is not None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        start = tokenizer(text, return_tensors="pt").input_ids
        made = model.generate(start, max_new_tokens=40, do_sample=False, pad_token_id=0)[0]
        print(repr(tokenizer.decode(made)))


if __name__ == "__main__":
    arguments = sys.argv[1:]
    text = None
    if "--text" in arguments:
        place = arguments.index("--text")
        text = arguments[place + 1]
        del arguments[place:place + 2]
    main(*arguments, text=text)
