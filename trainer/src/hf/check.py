"""Opens an exported folder in transformers and compares its logits with ours; then generates.

    python check.py DIR IDS LOGITS [--text TEXT]

DIR is what `ztrain export --format hf` wrote, IDS a JSON list of token ids (one document), LOGITS our logits for them as
little-endian f32. Exit code 0: they agree within 1e-4; 1: they do not; 77: transformers or torch cannot be had here.
"""

import json
import pathlib
import sys

try:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, ZayaForCausalLM
except ImportError as error:
    print(f"transformers cannot be had: {error}")
    sys.exit(77)

BOUND = 1e-4


def main(folder, ids, logits, text=None):
    torch.set_num_threads(1)
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert isinstance(model, ZayaForCausalLM), type(model)
    odd = {key: value for key, value in report.items() if value}
    assert not odd, f"tensors without a place, or places without a tensor: {odd}"
    ids = torch.tensor([json.loads(pathlib.Path(ids).read_text())])
    with torch.no_grad():
        theirs = model(input_ids=ids, use_cache=False).logits[0]
    ours = torch.frombuffer(bytearray(pathlib.Path(logits).read_bytes()), dtype=torch.float32).view(theirs.shape)
    apart = ((ours - theirs).norm() / theirs.norm()).item()
    most = (ours - theirs).abs().max().item()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}: {tuple(theirs.shape)} logits, "
          f"|a - b| / |b| = {apart:.1e}, largest difference {most:.1e}")
    assert apart <= BOUND, f"more than {BOUND} apart"
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
