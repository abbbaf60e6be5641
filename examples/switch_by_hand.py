"""The actor without the trainer: sample, learn, switch by hand, generate, save.

    python examples/switch_by_hand.py [MODEL_DIR]
    torchrun --nproc-per-node 4 examples/switch_by_hand.py [MODEL_DIR]

Every rank runs this script. Four ranks train in TP2·PP2 and generate in TP4, fewer train and generate with a copy each.
Without MODEL_DIR the model is a tiny random llama. Writes runs/switch_by_hand/hf.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist

from rl3d import Actor, PPOConfig
from rl3d.data.tiny import make_tiny_model

TINY = dict(model_type="llama", hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=128, rope_theta=10000.0, tie_word_embeddings=True)  # fmt: skip


def main(scratch: str) -> None:
    four = os.environ.get("WORLD_SIZE") == "4"
    actor = Actor(
        sys.argv[1] if len(sys.argv) > 1 else make_tiny_model(f"{scratch}/model", TINY),
        train="tp2.pp2.zero1" if four else "tp1.pp1.zero1",
        gen="tp4" if four else "tp1",
        algorithm=PPOConfig(batch_size=8, lr=1e-4),
        max_sequence_length=64,
        verify=True,  # compare the fingerprint of every parameter after each switch
    )
    rank, device = actor.runtime.rank, actor.runtime.device

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    prompts = actor.tokenizer(["say a :", "say b :"], return_tensors="pt").to(device)
    input_ids = prompts["input_ids"].repeat_interleave(4, dim=0)  # four samples a prompt

    # rollout() switches to generation and back by itself.
    rollout = actor.rollout(input_ids, max_new_tokens=16)
    texts = actor.tokenizer.batch_decode(rollout.sequences[:, input_ids.shape[1] :], skip_special_tokens=True)
    rewards = torch.tensor([float(sum(c.isdigit() for c in text)) for text in texts])  # any score will do
    metrics = actor.update(rollout.sequences, rewards, rollout.logprobs)
    say(f"loss {metrics['total_loss']:.4f}, gradient norm {metrics['actor/grad_norm']:.3f}")

    # A switch called on rank 0 alone: the other ranks carry it out while they wait in the barrier.
    if rank == 0:
        report = actor.switch_to_generation()
        say(f"to generation: {report.bytes_received / 1e3:.1f} kB received in {report.seconds['move'] * 1e3:.1f} ms")
    dist.barrier()
    assert actor.is_generation_mode

    answers = actor.generate(prompts["input_ids"], max_new_tokens=16, temperature=0.7, top_p=0.9)
    for text in actor.tokenizer.batch_decode(answers, skip_special_tokens=True):
        say(f"  {text}")

    actor.switch_to_training()
    actor.save_hf("runs/switch_by_hand/hf")
    say("wrote runs/switch_by_hand/hf")
    actor.runtime.shutdown()  # all ranks leave together


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(scratch)
