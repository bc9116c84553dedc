"""Two processes get one prompt: the second reads the KV that the first computed.

    python examples/reuse_across_processes.py MODEL_DIR STORE_URL

for example with the model that `kvferry demo` leaves behind:

    python examples/reuse_across_processes.py \
        .demo/SmolLM2-135M-Instruct file:///tmp/kvferry-example?max_bytes=1GiB
"""

from __future__ import annotations

import subprocess
import sys

from kvferry.engine import LLM, SamplingParams

PROMPT = "One line of a text that is asked about again and again.\n" * 30 + "In short:"


def ask(model_dir: str, store: str) -> None:
    with LLM(model_dir, store=store) as llm:
        [completion] = llm.generate([PROMPT], SamplingParams(max_tokens=8))
    print(
        f"{len(completion.prompt_token_ids)} prompt tokens, "
        f"{completion.num_external_tokens} read from the store, "
        f"first token after {completion.ttft_seconds:.2f} s: {completion.text!r}"
    )


def main() -> None:
    if len(sys.argv) == 4 and sys.argv[1] == "--ask":
        return ask(sys.argv[2], sys.argv[3])
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    for _ in range(2):
        subprocess.run([sys.executable, __file__, "--ask", *sys.argv[1:]], check=True)
    return None


if __name__ == "__main__":
    main()
