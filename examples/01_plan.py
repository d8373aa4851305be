"""Plan Llama-3 405B for 2,048 dies of CloudMatrix384, on any laptop and without torch."""

import sys

import hyper_parallel as hp

workload = hp.Workload(seq_len=8192, tokens_per_step=2048 * 8192)
plan = hp.plan("llama-3-405b", topology="cloudmatrix384", workload=workload, num_devices=2048)

print(plan.explain())
print()
print("All of this is predicted; nothing ran. torch imported:", "torch" in sys.modules)
