"""Greedy tokens of a directory in vLLM, in a process of its own: python -m tests.io.vllm_tokens DIRECTORY PROMPTS NEW."""

import json
import os
import sys

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def main(directory: str, prompts: str, new_tokens: str) -> None:
    os.environ.update(SETTINGS)
    from vllm import LLM, SamplingParams

    llm = LLM(directory, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=192, block_size=32)
    params = SamplingParams(temperature=0.0, max_tokens=int(new_tokens), ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in json.loads(prompts)], params, use_tqdm=False)
    print("TOKENS " + json.dumps([list(output.outputs[0].token_ids) for output in outputs]))


if __name__ == "__main__":
    main(*sys.argv[1:])
