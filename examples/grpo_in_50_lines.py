"""GRPO on 2,000 instruction rows, in less than 50 lines.

    python examples/grpo_in_50_lines.py [MODEL_DIR] [--steps N]
    torchrun --nproc-per-node 2 examples/grpo_in_50_lines.py [MODEL_DIR] [--steps N]

Every rank runs this script. Without MODEL_DIR the model is a tiny random llama, made on the spot.
"""

import argparse
import random
import string
import tempfile

from rl3d import Actor, PPOConfig, RLTrainer
from rl3d.config import RolloutConfig, TrainerConfig
from rl3d.data.tiny import make_tiny_model

TINY = dict(model_type="llama", hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=128, rope_theta=10000.0, tie_word_embeddings=True)  # fmt: skip


def reward(prompt: str, response: str, answer: str) -> float:
    """Share of the right letter among the response's characters."""
    return response.count(answer) / max(len(response.replace(" ", "")), 8)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    letters = [random.Random(i).choice(string.ascii_lowercase[:4]) for i in range(2000)]
    rows = [{"prompt": f"repeat the letter {letter} :", "answer": letter} for letter in letters]

    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or make_tiny_model(f"{scratch}/model", TINY)
        config = PPOConfig(batch_size=16, mini_batch_size=8, ppo_epochs=1, clip_coef=0.2, max_grad_norm=1.0, kl_coef=0.001,
                           lr=1e-5 if args.model else 3e-3)  # fmt: skip
        actor = Actor(model, algorithm=config, reference=True, max_sequence_length=128)
        trainer = RLTrainer(actor, actor.tokenizer, rows, config, reward, rollout=RolloutConfig(n=8, max_new_tokens=16),
                            trainer=TrainerConfig(name="grpo_in_50_lines", steps=args.steps, resume="never"))  # fmt: skip
        trainer.add_callback(lambda step, logs: print(f"step {step}: reward {logs['reward_mean']:.3f}"))
        trainer.train()
        actor.runtime.shutdown()  # all ranks leave together


if __name__ == "__main__":
    main()
