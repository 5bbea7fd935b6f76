"""Writes docs/trust.md: every claim that this code makes executable, its test, and how far the error is from its tolerance.

    python -m tests.tools.trust --out docs/trust.md

The claims stand first, as data. The named tests run, and the errors that helpers/comparison.py measures in them are gathered. A
claim whose test does not exist, is skipped, fails or compares nothing is an error, and nothing is written.
"""

import argparse
import os
import sys
import textwrap
import time
from datetime import date
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.tools.reach import COLUMNS, NOTES, ROWS, SAME

# Two lines each: the claim and its place (in the paper, as the chapter cites it; of our own design, a heading of design.md), then
# the test below tests/, -k WORD for those of its cases that are called so, and = HOW if comparison.py does not decide:
# exact (equal to the bit, or exactly zero), yes or no (something changes, or is counted), or a tolerance of the test itself.
CLAIMS = """
== compressive
Scores are Transformer-XL's terms of content and of distance. (Transformer-XL)
    reference/test_compressive.py::test_relative_attention_equals_direct_indexing
The shift's backward is its adjoint; hidden scores get exactly zero. (Transformer-XL)
    reference/test_compressive.py::test_the_backward_shift_is_the_adjoint = 1e-12
The model is Algorithm 1, one position at a time. (Algorithm 1)
    test_compressive.py::test_forward_is_algorithm_1_and_transformer_xl_without_compressed_memory
Without compressed memory it is Transformer-XL, with no other parameter. (3.3)
    test_compressive.py::test_without_compressed_memory_the_compression_options_change_nothing = exact
M rows of memory are a longer segment read before this one. (Transformer-XL)
    test_claims.py::test_a_memory_is_a_longer_segment_before_this_one
Both memories are queues: the oldest rows leave first. (Algorithm 1)
    test_compressive.py::test_memories_are_queues_of_the_whole_history
No gradient passes through memory into an earlier segment. (Algorithm 1)
    test_reach.py::test_each_loss_reaches_what_the_paper_says_and_nothing_else -k compressive = exact
Max and mean pooling take every c rows. (3.2)
    test_compressive.py::test_pooling_equals_a_loop
The convolution's kernel and stride are c; g is its transpose in form. (3.2)
    test_compressive.py::test_convolutions_equal_torchs
Dilated convolutions are their layers in order, then the strided one. (3.2)
    test_compressive.py::test_dilated_conv_is_its_layers_in_order
Most-used keeps the most used rows, in their order in time. (3.2)
    test_compressive.py::test_most_used_keeps_the_most_used_in_order = exact
Usage is the mean attention of the segment that evicts. (3.2)
    reference/test_compressive.py::test_usage_is_the_mean_attention_at_eviction = exact
Every compression's backward is its derivative. (3.2)
    reference/test_compressive.py::test_compression_gradient
The attention-reconstruction loss is Algorithm 2. (Algorithm 2)
    test_compressive.py::test_attention_reconstruction_equals_algorithm_2
Its backward and auto-encoding's are the losses' derivatives. (3.2)
    reference/test_compressive.py::test_auxiliary_gradient
A compression loss trains the compression and nothing else. (3.2)
    test_compressive.py::test_the_compression_loss_reaches_the_compression_and_nothing_else = exact
The task loss trains it only under BPTT, from a later segment. (Table 5)
    test_compressive.py::test_the_task_loss_reaches_the_compression_only_under_bptt_and_across_segments = exact
Zeros before a document compress to zeros. (Algorithm 1)
    test_compressive.py::test_zeros_compress_to_zeros = exact
There the compression's loss and its gradient are zero, not NaN. (Algorithm 1)
    test_compressive.py::test_the_loss_at_a_documents_start_is_exactly_zero = exact
The temporal range is l (M + c C). (3.3)
    test_compressive.py::test_temporal_range_and_description = exact
Compressed memory lets a token count in later segments. (3.3)
    test_compressive.py::test_how_many_segments_later_a_token_still_counts = yes or no
A trained model can be read with memories of other sizes. (Appendix B)
    test_compressive.py::test_memory_sizes_can_change_after_training
Attention by age is the sum of the weights of those rows. (Figure 2)
    lab/reports/test_memories.py::test_attention_by_bucket_equals_summing_the_weights
The compression loss by layer is the mean over segments. (Figure 6)
    lab/reports/test_memories.py::test_compression_by_layer_weighs_segments_equally
The learning rate rises from 1e-6 to 3e-4 and falls by cosine. (section 5)
    training/test_optimization.py::test_the_compressive_papers_schedule = 1e-6
After iteration 60,000 every fourth updates. (5.5.1)
    training/test_optimization.py::test_updates_come_every_k_iterations_from_n_on = exact
The two objectives' gradients are limited apart. (3.2)
    training/test_optimization.py::test_gradients_are_averaged_then_clipped_for_each_objective = 1e-4
Memories can be carried over documents without a reset. (Appendix E)
    evaluation/test_score.py::test_memory_that_is_carried_over_documents_is_that_of_their_joined_text = 1e-9
The reference's backward is the derivative of the model. (Algorithm 1)
    reference/test_compressive.py::test_model_gradient
The accelerated model is the reference, in every variant. (Algorithm 1)
    test_contract.py::test_accelerated_equals_reference -k compressive
Simplified positions are Memformer's Eqs. 2-4, clipped. (decision 17)
    reference/test_compressive.py::test_simplified_positions_equal_direct_indexing
Adaptive inputs are the rows of the bands, projected. (decision 18)
    test_adaptive.py::test_inputs_are_rows_of_the_joined_tables
The adaptive softmax and its loss are torch's. (decision 18)
    test_adaptive.py::test_the_softmax_is_torchs
== block_recurrent
A token sees exactly the W tokens before it. (3.1)
    test_block_recurrent.py::test_masks_equal_the_definition = exact
Tiles of W x 2W are full attention under that mask. (3.1, Fig. 2)
    reference/test_block_recurrent.py::test_sliding_attention_equals_direct_indexing
The accelerated tiles are the plain ones. (3.1)
    attention/test_sliding_window.py::test_tiled_sliding_attention_equals_plain
The cost is linear in N. (3.1)
    test_claims.py::test_a_blocks_cost_does_not_depend_on_the_segments_length = exact
The keys and values of the last block are kept for the next segment. (3.1)
    test_block_recurrent.py::test_segmented_run_equals_one_long_run
Sliding attention reaches W tokens a layer; recurrence reaches further. (3.1)
    test_block_recurrent.py::test_slide_forgets_beyond_its_reach_and_recurrence_does_not = exact
Zero keys before a document take their part of softmax. (decision 7)
    reference/test_block_recurrent.py::test_a_document_starts_with_zero_keys_that_take_softmax_mass = 1e-8
Queries and keys have unit length, values have not. (3.3)
    reference/test_block_recurrent.py::test_queries_and_keys_have_unit_length_and_values_have_not = 1e-4
Relative positions fall into T5's buckets. (3.3)
    reference/test_block_recurrent.py::test_position_buckets_of_t5 = exact
States attend to themselves and 2W tokens; IDs follow the norm. (3.2, 3.3)
    reference/test_block_recurrent.py::test_state_update_equals_direct_attention
States that start alike stay alike without IDs, and part with them. (3.3)
    test_claims.py::test_states_that_start_alike_stay_alike_without_ids = 1e-12
Tokens read the states as they were before their block. (3.2)
    reference/test_block_recurrent.py::test_states_read_both_blocks_and_tokens_read_states_before_their_update = exact
The fixed and the LSTM gate are Eqs. 1-7. (3.4, Eqs. 1-7)
    test_block_recurrent.py::test_gates_equal_their_equations = 1e-12
Gates start small: biases N(0, 0.01), weights variance 0.1/fan_in. (3.5)
    reference/test_block_recurrent.py::test_initialisation_follows_the_paper = 2% to 15%
An LSTM gate that remembers keeps a state over 500 blocks, in bfloat16. (3.5)
    test_block_recurrent.py::test_a_forget_gate_near_one_forgets_over_hundreds_of_blocks_in_bfloat16
Dual, single and skip: each gate's backward is its derivative. (3.6)
    reference/test_block_recurrent.py::test_gating_gradient
Feedback: low layers read the state that the layer above left. (3.7)
    reference/test_block_recurrent.py::test_feedback_lets_the_first_layer_read_the_last_blocks_state = yes or no
Within a segment the last update gets no gradient, earlier ones do. (3.2)
    reference/test_block_recurrent.py::test_last_state_update_gets_no_gradient_within_a_segment = exact
The learned initial state's gradient is summed over lanes. (decision 10)
    reference/test_block_recurrent.py::test_initial_state_gradient_sums_over_lanes
A bucket that no pair reaches has exactly no gradient. (3.3)
    reference/test_block_recurrent.py::test_unreachable_buckets_get_exactly_zero_gradient = exact
151M, 164M, 327M, 375M and 320M parameters are met. (4.1, Table 2)
    house/test_docs.py::test_python_blocks_run_and_print_what_is_shown -k docs/block_recurrent.md = exact
Adafactor's schedule: 1,000 steps of warm-up, then 1/sqrt(t). (section 4)
    training/test_optimization.py::test_the_papers_schedule = 1e-6
The reference's backward is the derivative of the model. (Fig. 1)
    reference/test_block_recurrent.py::test_model_gradient
The accelerated model is the reference, with all gates and baselines. (Fig. 1)
    test_contract.py::test_accelerated_equals_reference -k block_recurrent
== memformer
Transformer-XL's attention is Eq. 1, terms (a) to (d). (Eq. 1)
    attention/test_signed_distance.py::test_transformer_xl_attention_is_equation_1
Simplified attention is Eqs. 3 and 4: R in keys and values. (Eqs. 3-4)
    reference/test_memformer.py::test_simplified_attention_is_equations_3_and_4
A key's bias has exactly no gradient. (Eq. 2)
    test_memformer.py::test_key_biases_have_exactly_no_gradient = exact
The encoder reads and writes memory, the decoder predicts. (Eq. 5, Eq. 6)
    test_memformer.py::test_the_model_is_equations_5_to_7
Layers are put together as in Figures 1b, 2a. (Figure 1b, Figure 2a)
    reference/test_memformer.py::test_layers_are_figures_1_and_2
Every layer that should reads memory by cross attention. (Figure 2b)
    test_memformer.py::test_memory_is_read_by_every_layer_that_should = yes or no
Slot attention is the masked S x (S + N) attention. (Figure 2c)
    test_memformer.py::test_slot_attention_is_masked_attention_over_slots_and_encodings
Slots never mix. (2.2.3)
    test_memformer.py::test_slots_never_mix = exact
A slot that attends only to itself does not change. (2.2.3)
    test_memformer.py::test_a_slot_that_attends_only_to_itself_does_not_change = exact
The bias of a slot on itself starts at 0 in the paper's model. (decision 9)
    reference/test_memformer.py::test_retention_starts_where_the_config_says = exact
A segment is written to memory when the next one is read. (Eq. 5)
    test_memformer.py::test_a_segment_is_written_to_memory_when_the_next_one_is_read = exact
The temporal range is unlimited. (2.5)
    test_memformer.py::test_a_token_counts_in_every_later_segment = yes or no
A special token per task starts the decoder. (2.3)
    test_memformer.py::test_task_tokens_and_rows
The tasks ask for this segment, the last one, the one before. (2.3)
    data/test_tasks.py::test_tasks_ask_for_what_the_lane_has_read = exact
Tasks are drawn with the shares that are asked for. (2.3)
    data/test_tasks.py::test_shares_are_as_configured = yes or no
Spans have Poisson lengths; one mask each, 30% in all. (2.3)
    data/test_tasks.py::test_span_lengths_are_poisson = yes or no
Padding is never read, neither by slots nor by the decoder. (2.3)
    test_memformer.py::test_padding_is_never_read = exact
Memory replay is BPTT, in the reference. (Algorithm 1)
    reference/test_memformer.py::test_numpy_memory_replay_equals_back_propagation_through_time
Both have the gradients of their loss, over three segments. (Algorithm 1)
    reference/test_memformer.py::test_numpy_rollouts_have_the_gradients_of_their_loss
BPTT, checkpointing and memory replay agree for every model. (Algorithm 1)
    test_replay.py::test_the_three_methods_agree
Both sides' rollouts agree. (Algorithm 1)
    test_memformer.py::test_rollouts_of_both_sides_agree
So they do over 32 segments, and gradient reaches the first. (Figure 3b)
    test_claims.py::test_gradient_reaches_over_the_papers_horizon -k memformer
Replay makes one backward call a segment, after passes without gradient. (Algorithm 1)
    test_replay.py::test_memory_replay_keeps_one_segments_graph = exact
It takes the memory of one segment, whatever the horizon. (Algorithm 1)
    test_replay.py::test_memory_replay_takes_the_memory_of_one_segment = 1%
Other dropout, a lost gradient or a lost task are noticed. (decision 14)
    test_replay.py::test_a_broken_replay_function_is_noticed = yes or no
Memory stays near float32's over 1,000 segments in bfloat16. (2.5)
    test_types.py::test_over_1000_segments_the_state_stays_near_that_of_float32 -k memformer = yes or no
Table 2's 1.05M and 1.32M parameters of one attention. (Eqs. 2-4)
    reference/test_memformer.py::test_parameters_of_table_2 = 1%
Transformer-XL's 66.69M and 80.35M, our 77.06M of 76.21M. (Table 1)
    house/test_docs.py::test_python_blocks_run_and_print_what_is_shown -k docs/memformer.md = exact
The reference's backward is the derivative of the model. (Eq. 7)
    reference/test_memformer.py::test_model_gradient
The accelerated model is the reference, tasks included. (Eq. 7)
    test_contract.py::test_accelerated_equals_reference -k memformer
== memorizing
Each query attends to its K nearest keys in memory, and to no others. (4.6)
    reference/test_memorizing.py::test_a_query_attends_to_its_nearest_keys_alone = 1e-11
Looking up all of the memory is attention to it. (4.6)
    reference/test_memorizing.py::test_looking_up_all_of_the_memory_is_attention_to_it = 1e-12
The memory is a queue of what the memory layer saw before the segment. (decision 5)
    reference/test_memorizing.py::test_the_memory_holds_what_the_memory_layer_saw_before_the_segment = exact
Empty rows are found last, and add nothing. (decision 6)
    reference/test_memorizing.py::test_empty_rows_are_found_last_and_add_nothing = 1e-7
Without a memory, or with the gate closed, it is the Block-Recurrent paper's XL. (4.6)
    reference/test_memorizing.py::test_without_a_memory_it_is_the_xl_of_the_block_recurrent_paper
No gradient reaches the memory. (decision 10)
    test_memorizing.py::test_the_memory_is_no_part_of_the_graph = exact
A token counts M / N segments later, and not after that. (4.6)
    test_memorizing.py::test_how_many_segments_later_a_token_still_counts = exact
The reference's backward is the derivative of the model. (4.6)
    reference/test_memorizing.py::test_model_gradient
The accelerated lookup is the reference's. (4.6)
    attention/test_retrieval.py::test_it_is_the_references
The accelerated model is the reference. (4.6)
    test_contract.py::test_accelerated_equals_reference -k memorizing
== pretrained_recurrence
Logits are those of transformers' GPT-2. (section 5)
    paths/presets/test_gpt2_weights.py::test_logits_are_those_of_transformers = 1e-5
So are the gradients of a fine-tuning step. (section 5)
    paths/presets/test_gpt2_weights.py::test_the_gradient_of_a_fine_tuning_step_is_that_of_transformers = 1e-4
Recurrence added to the same weights leaves a first window as it was. (3.1)
    paths/presets/test_gpt2_weights.py::test_recurrence_is_added_to_the_same_weights = 1e-4
z is Eq. 1, and the other poolings are as defined. (Eq. 1, 3.1)
    reference/test_pretrained_recurrence.py::test_pooling_is_equation_1
Pooling's backward is its derivative. (Eq. 1)
    reference/test_pretrained_recurrence.py::test_pool_gradient
The gradient of the layers' scores sums to zero and is not zero. (Eq. 1)
    test_pretrained_recurrence.py::test_the_gradient_of_the_layer_scores_sums_to_zero = 1e-12
h_prev is a key and a value of layer l_ins, and nothing else. (Figure 2, 3.1)
    reference/test_pretrained_recurrence.py::test_attention_is_over_inserted_vectors_and_earlier_tokens
A first window has no slot, whatever the state holds. (decision 5)
    test_pretrained_recurrence.py::test_a_first_window_has_no_slot
A document of one window is plain GPT-2, gradients too. (decision 5)
    test_pretrained_recurrence.py::test_a_document_of_one_window_is_plain_gpt2
Gradient passes through every z of a document. (3.1)
    reference/test_pretrained_recurrence.py::test_gradient_through_all_windows_of_a_document
Only the last window's z gets none. (3.1)
    test_pretrained_recurrence.py::test_the_last_windows_vector_has_no_gradient_and_the_others_have = exact
It passes over 20 windows, by each method alike. (section 5)
    test_claims.py::test_gradient_reaches_over_the_papers_horizon -k pretrained_recurrence
Information passes through any number of windows. (3.1)
    test_pretrained_recurrence.py::test_information_passes_through_any_number_of_windows = yes or no
Storing the z's alone gives the same gradients. (3.2)
    reference/test_pretrained_recurrence.py::test_checkpointing_at_the_bottleneck_is_exact
The windows are those of the paper's example, T = 10, o = 3. (4.2)
    data/test_windows.py::test_the_papers_example = exact
Disjoint, maximal and intermediate overlap are Figure 3. (Figure 3)
    data/test_windows.py::test_figure_3 = exact
Every token after the first is scored once, in order. (4.2)
    data/test_windows.py::test_every_token_after_the_first_is_scored_once_in_order = exact
A prediction has o + 1 to T tokens of context. (4.2)
    data/test_windows.py::test_every_prediction_has_at_least_the_overlap_and_at_most_the_window_before_it = exact
The sum of log-probabilities is that of windows read one by one. (4.2)
    evaluation/test_score.py::test_any_window_and_overlap_in_any_batch_and_order = 1e-11
No scored prediction sees its target through z. (4.2)
    test_pretrained_recurrence.py::test_the_leak_is_where_nothing_is_scored
Pooling the advance alone pools what the next window does not read. (footnote 3)
    reference/test_pretrained_recurrence.py::test_what_advance_pools_is_what_the_next_window_does_not_read = exact
Training reads the windows that evaluation scores. (4.2)
    test_pretrained_recurrence.py::test_training_from_lanes_is_training_on_the_document
Words are those of the original text. (section 5)
    evaluation/test_score.py::test_words_are_those_of_the_original_text = exact
FLOPs per token are the nine values of Tables 1 and 2. (Tables 1 and 2)
    evaluation/test_overlap.py::test_the_papers_flops_per_token = exact
Our exact count is that of torch's counter. (Tables 1 and 2)
    evaluation/test_overlap.py::test_the_count_is_that_of_torchs_counter = exact
A greedy continuation in a new window is the reference's. (5.3)
    test_pretrained_recurrence.py::test_prompts_and_continuations = exact
A new window knows its context through the vector alone. (5.3)
    test_pretrained_recurrence.py::test_a_new_window_sees_its_context_only_through_the_vector = yes or no
The module has 388,580 parameters beside 124,439,808. (3.1)
    house/test_docs.py::test_python_blocks_run_and_print_what_is_shown -k docs/pretrained_recurrence.md = exact
The reference's backward is the derivative of the model. (3.1)
    reference/test_pretrained_recurrence.py::test_model_gradient
The accelerated model is the reference. (3.1)
    test_contract.py::test_accelerated_equals_reference -k pretrained_recurrence
== design
Each shared operation's backward is its full Jacobian. (the same)
    reference/test_operations.py
The accelerated models are the references, after five steps too. (the same)
    test_contract.py::test_accelerated_equals_reference
So are they on a GPU's paths, run here on a CPU. (the same)
    attention/test_sdpa.py::test_a_model_on_a_gpus_paths_equals_its_reference
Dropout acts where the reference has it. (the same)
    test_contract.py::test_dropout_acts_where_the_reference_has_it
One seed gives both sides the same weights by name. (One idea)
    test_contract.py::test_a_seed_gives_the_references_weights_by_name
Token by token gives the logits of whole segments. (One idea)
    test_contract.py::test_step_and_advance_equal_forward
No later token changes an earlier logit. (One idea)
    test_contract.py::test_later_tokens_change_no_earlier_logit = 1e-12
Every parameter is trained, but those that never can be. (Models and back-propagation)
    test_contract.py::test_every_parameter_gets_gradient_from_a_rollout = exact
Each loss reaches the parameters of the tables below, no others. (Models and back-propagation)
    test_reach.py::test_each_loss_reaches_what_the_paper_says_and_nothing_else = exact
The three ways agree, dropout and all. (Models and back-propagation)
    test_contract.py::test_the_three_ways_of_back_propagation_agree
No gradient leaves a rollout through its first state. (Models and back-propagation)
    test_replay.py::test_no_gradient_leaves_the_rollout_through_its_first_state = exact
A loss in chunks is that of all logits. (Models and back-propagation)
    test_loss.py::test_a_loss_in_chunks_is_that_of_all_logits
A layer computed again gives the same gradients. (Models and back-propagation)
    compile/test_checkpoint_layers.py::test_the_gradients_are_the_same_with_dropout
Every document is read once, in one lane. (Evaluation and the laboratory)
    data/test_lanes.py::test_one_pass_reads_every_document_once_in_one_lane = exact
No segment holds two documents; padding is never scored. (Data)
    data/test_lanes.py::test_no_segment_holds_two_documents_and_padding_is_never_scored = exact
Dynamic evaluation is scoring and training by hand. (Evaluation and the laboratory)
    lab/reports/test_dynamic.py::test_one_lane_is_scored_and_trained_as_by_hand = 1e-10
A resumed run goes on bit for bit. (Training and programs)
    process/test_train.py::test_a_stopped_run_resumes_bit_for_bit = exact
Two processes are one. (Training and programs)
    process/test_train.py::test_two_processes_are_one = 1e-9
Lanes in groups give the gradient of all at once. (Models and back-propagation)
    process/test_train.py::test_lanes_in_groups_give_the_gradient_of_all_at_once = 1e-10
"""
TITLES = {
    "compressive": ("C", "Compressive Transformer"),
    "block_recurrent": ("B", "Block-Recurrent Transformer"),
    "memformer": ("M", "Memformer"),
    "memorizing": ("R", "Memorizing Transformer"),
    "pretrained_recurrence": ("P", "Recurrence added to GPT-2"),
    "design": ("D", "Our own design"),
}
HEAD = """# Trust, row by row

Each row is something that a paper says, or that we say of our own code, and a test that fails if it is false. The
numbers are measured, not typed. This page is written by the command

```bash
python -m tests.tools.trust --out docs/trust.md
```

On {date}, with torch {torch} on {cores} shared cores, it ran {cases} cases of the {claims} claims' tests in {minutes}
minutes. If a test is missing, is skipped or fails, nothing is written.

- **error** is the worst of all tensors that the test compares: the largest difference, divided by the largest number
  of the expected tensor. **times** says how many such errors fit into the tolerance.
- Where no error is given, **tolerance** says how the test decides. *exact* is equality to the bit, or exactly zero.
  *yes or no* says that something changes, or is counted. A number is the tolerance in the test itself.
- To check a row, run its test, which stands below the table: `pytest` and what the list says.
"""
INTRODUCTIONS = {"design": "The places are headings of [design.md](design.md)."}
REACH = """
## Which loss trains what

Every loss against every group of parameters, over all variants of the tests: ● all parameters of the group get
gradient, ◐ some do, 0 is exactly zero in all. Reference and model agree on each parameter. The table is
`tests/tools/reach.py`, and what measures it is
`tests/test_reach.py::test_each_loss_reaches_what_the_paper_says_and_nothing_else`.

A loss of "the next segment" is what arrives through the state alone, in the pass over the segment before it. A row that
begins with dots has only the cells that differ from those above it.
"""
ROOT = Path(__file__).parents[2]


class Claim(NamedTuple):
    """One row of the page."""

    chapter: str  # the page of docs/ that it belongs to
    name: str  # C1
    says: str
    place: str
    test: str  # node id
    word: str  # in the names of the cases that count; "" for all
    how: str  # "" if the errors are measured

    def covers(self, node: str) -> bool:
        """Whether a case of a test belongs to this claim."""
        case = node.removeprefix(self.test)
        return node.startswith(self.test) and case[:1] in ("", "[", ":") and self.word in case


def read_claims(text: str = CLAIMS) -> list[Claim]:
    """The claims of a text in the form of CLAIMS."""
    found: list[Claim] = []
    for part in text.split("== ")[1:]:
        chapter, *lines = part.splitlines()
        for number, (claim, test) in enumerate(zip(lines[::2], lines[1::2], strict=True), 1):
            says, _, place = claim.rpartition(" (")
            test, _, how = test.partition(" = ")
            test, _, word = test.partition(" -k ")
            name = f"{TITLES[chapter][0]}{number}"
            found.append(Claim(chapter, name, says, place.removesuffix(")"), f"tests/{test.strip()}", word, how))
    return found


class Record:
    """A pytest plugin: runs only the cases of claims, and keeps their outcomes and the errors that they measure."""

    def __init__(self, claims: list[Claim]):
        self.claims, self.outcomes, self.errors, self.now = claims, {}, {}, None

    def pytest_collection_modifyitems(self, items: list) -> None:
        """Leave out other cases; have tests/helpers/comparison.py report here."""
        from tests.helpers import comparison

        items[:] = [item for item in items if any(claim.covers(item.nodeid) for claim in self.claims)]
        comparison.measured = lambda error, tolerance: self.errors[self.now].append((error, tolerance))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Errors belong to this case from here on."""
        self.now = nodeid
        self.errors[nodeid] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst outcome of set-up, call and tear-down."""
        if self.outcomes.get(report.nodeid, "passed") == "passed":
            self.outcomes[report.nodeid] = report.outcome

    def problems(self) -> list[str]:
        """A line for each claim that cannot be shown."""
        lines = []
        for claim in self.claims:
            cases = {node: outcome for node, outcome in self.outcomes.items() if claim.covers(node)}
            bad = [f"{outcome}: {node}" for node, outcome in cases.items() if outcome != "passed"]
            if not cases:
                bad = [f"no such test: {claim.test} {claim.word}"]
            elif not claim.how and not self.worst(claim):
                bad = bad or [f"it compares nothing: {claim.test}"]
            lines += [f"{claim.name} {line}" for line in bad]
        return lines

    def worst(self, claim: Claim) -> tuple[float, float] | None:
        """The (error, tolerance) that is nearest to failing; what a test expects to fail does not count."""
        pairs = [pair for node, errors in self.errors.items() if claim.covers(node) for pair in errors if pair[0] <= pair[1]]
        return max(pairs, key=lambda pair: pair[0] / pair[1], default=None)


def number(value: float) -> str:
    """3e-12 and 1.2e-09 in few letters."""
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return "0" if value == 0 else f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def margin(error: float, tolerance: float) -> str:
    """How many times the error fits into the tolerance, in two digits; a dash if there is no error."""
    ratio = float(f"{tolerance / error:.1e}") if error else 0.0
    return number(ratio) if ratio >= 1e6 else f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.1f}" if ratio else "–"


def claim_lines(claims: list[Claim], record: Record) -> list[str]:
    """A table of claims, and the list of their tests below it."""
    lines = ["| | claim | place | error | tolerance | times |", "| --- | --- | --- | --- | --- | --- |"]
    for claim in claims:
        pair = record.worst(claim)
        cells = ("–", claim.how, "–") if claim.how else (number(pair[0]), number(pair[1]), margin(*pair))
        lines.append(f"| {claim.name} | {claim.says} | {claim.place} | {' | '.join(cells)} |")
    named = [f"- {claim.name} `{claim.test}{f' -k {claim.word}' if claim.word else ''}`" for claim in claims]
    return [*lines, "", *(line if len(line) <= 120 else line.replace(" `", "\n  `", 1) for line in named), ""]


def reach_lines(paper: str) -> list[str]:
    """The table of what each loss of a paper trains."""
    lines = [f"| loss | {' | '.join(COLUMNS[paper])} |", "| --- |" + " :-: |" * len(COLUMNS[paper])]
    lines += [f"| {label} | {' | '.join(cell.replace(SAME, '') for cell in cells)} |" for label, _, cells in ROWS[paper]]
    return [*lines, ""]


def page(claims: list[Claim], record: Record, seconds: float) -> str:
    """The text of docs/trust.md."""
    counts = {
        "claims": len(claims),
        "cases": f"{len(record.outcomes):,}",
        "minutes": f"{seconds / 60:.1f}",
        "cores": os.cpu_count(),
    }
    lines = HEAD.format(**counts, torch=torch.__version__, date=date.today()).splitlines()
    for chapter, (_, title) in TITLES.items():
        lines += ["", f"## {title}", "", INTRODUCTIONS.get(chapter, f"The chapter: [{chapter}.md]({chapter}.md)."), ""]
        lines += claim_lines([claim for claim in claims if claim.chapter == chapter], record)[:-1]
    lines += REACH.splitlines()
    for paper in ROWS:
        lines += ["", f"### {TITLES[paper][1]}", "", *textwrap.wrap(NOTES[paper], 120), "", *reach_lines(paper)[:-1]]
    return "\n".join(lines) + "\n"


def main(words: list[str]) -> int:
    """Run the claims' tests and write the page; 1 if a claim cannot be shown."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.trust", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "trust.md", help="the page")
    out = parser.parse_args(words).out.resolve()
    claims = read_claims()
    record, began = Record(claims), time.monotonic()
    tests = dict.fromkeys(claim.test for claim in claims)
    os.chdir(ROOT)
    status = pytest.main(["-q", "-o", "addopts=--import-mode=importlib", *tests], plugins=[record])
    problems = record.problems() or ([f"pytest ended with status {int(status)}"] if status else [])
    if problems:
        print(*problems, f"{len(problems)} problems; nothing is written", sep="\n", file=sys.stderr)
        return 1
    out.write_text(page(claims, record, time.monotonic() - began))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
