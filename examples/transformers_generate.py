"""Plain Transformers, with the KV of a document kept between runs.

    python examples/transformers_generate.py MODEL_DIR STORE_URL

Run it twice: the second run reads the KV that the first computed. The embedded engine and vLLM read
it, too, if they run the same weights in the same dtype.
"""

from __future__ import annotations

import sys
import time

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvferry.adapters.transformers import StoredKV

DOCUMENT = "One line of a text that is asked about again and again.\n" * 30
QUESTIONS = ("In short:", "The first word is")


def main(model_dir: str, store: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    with StoredKV(model, store) as kv:
        for question in QUESTIONS:
            input_ids = tokenizer(DOCUMENT + question, return_tensors="pt")["input_ids"]
            started = time.perf_counter()
            output = kv.generate(input_ids, max_new_tokens=8, do_sample=False)
            seconds = time.perf_counter() - started
            answer = tokenizer.decode(output[0, input_ids.shape[1] :])
            print(
                f"{input_ids.shape[1]} prompt tokens, {kv.num_loaded} read from the store, "
                f"answered after {seconds:.2f} s: {answer!r}"
            )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
