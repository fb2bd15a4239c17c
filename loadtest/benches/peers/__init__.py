"""What a user would pick instead, driven as processes of their own: each reads rounds from standard input and answers
with the seconds that it took. They may run under another Python than ours (`--vllm-python`)."""
