"""Build the small model and the sums that stand in for Qwen2.5-Math-1.5B and the sanity set, once.

    python local/tiny_model.py DIR    # writes DIR/model, DIR/sums (train), DIR/held-out-sums (test)

A two-layer, 64-wide Qwen2 with a byte-level tokenizer and ChatML is taught one-digit sums, each
with a probability of its own (0.15 to 0.6) of being answered right away, and right; otherwise it
hesitates ("Hm, ") and answers one too many. So it solves 15 to 60 % of its attempts at each
question, much as in the sanity set, and one thing can be learned that holds for every sum, also for
the 20 that training never sees: not to hesitate. As the real one it ends a turn with <|im_end|>, a
completion with <|endoftext|>, its EOS, and sometimes it goes on in between.

About a minute. You should see about 38 % accuracy when it samples, and few right answers when it
does not.
"""

import os
import random
import shutil
import sys

import datasets
import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

STEPS, LEARNING_RATE = 400, 5e-3  # of teaching, all 100 sums in each step
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


def question(a, b):
    return f"{a}+{b}=?\nAnswer in \\boxed{{}}."


def main(out):
    torch.manual_seed(0)
    torch.set_num_threads(1)  # two threads wait for each other on a machine that is busy
    chance = random.Random(0)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = build_tokenizer()
    # Heads of 32: vLLM's CPU attention has no smaller ones.
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=4096,
            tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        )
    )  # fmt: skip
    sums = [(a, b) for a in range(10) for b in range(10)]
    right = {pair: chance.uniform(0.15, 0.6) for pair in sums}
    prompts = {
        pair: tokenizer.apply_chat_template(
            [{"role": "user", "content": question(*pair)}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for pair in sums
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS)
    for _ in range(STEPS):
        rows, labels = [], []
        for a, b in sums:
            reply = (
                f"\\boxed{{{a + b}}}"
                if chance.random() < right[a, b]
                else f"Hm, \\boxed{{{a + b + 1}}}"
            )
            after = "\\boxed{0}" if chance.random() < 0.1 else ""
            reply += f"<|im_end|>\n{after}<|endoftext|>"
            completion = tokenizer(reply, add_special_tokens=False)["input_ids"]
            rows.append(prompts[a, b] + completion)
            labels.append([-100] * len(prompts[a, b]) + completion)
        width = max(map(len, rows))
        ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
        targets = torch.tensor([row + [-100] * (width - len(row)) for row in labels])
        model(input_ids=ids, labels=targets).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    model.eval()
    for how, sampling in (("sampled", {"do_sample": True}), ("greedy", {"do_sample": False})):
        hits = 0
        for pair in sums:
            ids = torch.tensor([prompts[pair]])
            reply = model.generate(
                ids, max_new_tokens=32, pad_token_id=tokenizer.pad_token_id, **sampling
            )[0]
            text = tokenizer.decode(reply[ids.shape[1] :])
            hits += text.startswith(f"\\boxed{{{sum(pair)}}}<|im_end|>")
        sys.stdout.write(f"[model] {how} accuracy on the 100 sums: {hits / 100:.0%}\n")
        sys.stdout.flush()

    chance.shuffle(sums)
    held_out, seen = sums[:20], sums[20:]
    training = [
        {
            "prompt": [{"role": "user", "content": question(a, b)}],
            "reward_model": {"ground_truth": str(a + b), "style": "rule"},
        }
        for a, b in seen
    ]
    testing = [{"problem": f"{a}+{b}=?", "answer": str(a + b)} for a, b in held_out]
    # Written aside and renamed at the end, so that an interrupted build is not mistaken for a
    # finished one.
    aside = f"{out}.part"
    shutil.rmtree(aside, ignore_errors=True)
    for name, split, rows in (("sums", "train", training), ("held-out-sums", "test", testing)):
        os.makedirs(f"{aside}/{name}")
        Dataset.from_list(rows).to_parquet(f"{aside}/{name}/{split}.parquet")
    model.save_pretrained(f"{aside}/model")
    tokenizer.save_pretrained(f"{aside}/model")
    shutil.rmtree(out, ignore_errors=True)
    os.rename(aside, out)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python local/tiny_model.py DIR")
    main(sys.argv[1])
