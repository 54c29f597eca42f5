"""Tests whose models are all compiled (``pytest --inside aot_eager``), sharded (``--inside fsdp2``), replicated
(``--inside ddp``) or on a default device (``--inside cuda``; ``cuda:inductor`` compiles there), and those that then
mean something else, with the reason.
Sharded and replicated ones are run by torchrun, and each process runs the same tests."""

import contextlib
import datetime
import importlib
import os
import sys

import torch
import torch.distributed as dist

import gaff.sessions.capture
import gaff.sessions.edit

IN_GRAPH = (
    "a checkpoint inside compiled code keeps its edits in the graph: nothing stays on modules, nothing is released"
)
REFUSED = "an edit in compiled code under a checkpoint around it is refused at closing while its backward has not run"
VIEWS = "compiled code refuses the gradient of a view in words of its own"

HANDLED = (
    "Dynamo follows the model's handler: an edit that fails is told at closing, or by a warning; values are told later"
)
ANEW = "compiled code gives the module a container of its own"
NO_COPY = "torch makes such a module's class anew for each"
NO_NUMBERS = "there is nothing to spread on the meta device"
_BY_FUNCTION = "a compiled custom Function tells the gradients of its own backward, too, as further ones of these calls"
COMPILED = {
    "test_a_receipt_says_that_the_edit_raised[a:grad_output": "it raises while torch traces it",
    "test_several_directions_that_are_written_to_between_runs": "they are refused: the graph holds what was made of them",
    "test_calls_that_come_back_in_reverse_are_told_apart": _BY_FUNCTION,
    "test_a_call_with_other_values_is_no_repetition": _BY_FUNCTION,
    "test_calls_whose_outputs_are_alike_are_told_apart_by_their_arguments": _BY_FUNCTION,
    "test_values_that_are_computed_back_count_as_the_same": _BY_FUNCTION,
    "test_a_session_that_is_closed_before_backward_still_refuses_what_it_cannot_repeat": _BY_FUNCTION,
    "test_of_a_view_that_was_changed_in_place_it_goes_through_too": "torch batches no backward of compiled code",
    "test_graphs_of_functorch_are_refused": "torch tells errors while tracing",
    "test_a_function_mode_of_the_program_sees_and_changes_what_the_program_does": "torch compiles no function mode of others",
    "test_a_closed_session_leaves_no_hook_and_no_attribute": "compiling leaves an attribute of torch's own",
    "test_reading_a_changed_argument_is_refused_and_clone_helps": "what graphs tell is copied at once",
    "test_a_bare_forward_after_the_session_stays_bare_while_the_first_loss_is_alive": IN_GRAPH,
    "test_nothing_stays_once_the_graph_is_freed": IN_GRAPH,
    "test_a_loss_that_is_held_keeps_no_hook_once_nothing_can_be_recomputed": IN_GRAPH,
    "test_released_edits_raise_in_backward": IN_GRAPH,
    "test_a_module_writes_into_the_dict_of_its_caller_also_where_it_is_edited": ANEW,
    "test_what_the_module_puts_under_another_key_is_the_edited_tensor": ANEW,
    "test_a_list_that_shrinks_and_grows_inside_the_module": ANEW,
    "test_grad_mode_on_inside_and_off_outside": "a graph is compiled in the grad mode that it is called in",
    "test_gradients_at_calls_under_no_grad_that_turn_grad_mode_on": "a graph is compiled in the grad mode that it is called in",
    "test_released_edits_raise_also_for_a_loss_that_was_put_aside": IN_GRAPH,
    "test_gradients_in_parts_are_refused": "compiled code brings a parameter's gradient in one part",
    "test_a_module_called_inside_a_backward_pass_is_refused": "compiled code runs its edits wherever it is called",
    "test_an_edit_that_cannot_be_repeated_raises": "compiled code repeats it: the edit is part of the graph",
    "test_the_whole_model_under_one_checkpoint": REFUSED,
    "test_gradients_are_those_of_the_edited_model_without_checkpointing[selective": "torch compiles no such checkpoint",
    "test_a_tensor_that_changes_before_the_recomputation_raises": "torch raises an error of its own",
    "test_an_attached_plan_is_a_context_too_and_tells_the_error_of_the_edit_only": "torch tells errors while tracing",
    "test_none_is_told_once_for_every_run[300]": "three hundred layers take a minute to compile, and twenty tell the same",
    "test_jit_trace_is_refused": "torch refuses to script what is compiled",
    "test_a_site_inside_fires_and_the_receipt_says_not_bitwise": "the receipt tells of compiled code",
    "test_a_site_outside_leaves_the_fast_path_alone": "the receipt tells of compiled code",
    "test_a_fake_value_is_kept_as_one": "fake values are what compiling works with",
    "test_what_stands_in_and_is_no_leaf_has_a_gradient_of_its_own": "torch compiles no double backward",
    "test_recursion_is_one_run": "a model that calls itself inside compiled code is refused",
    "test_a_long_session_at_a_leaf_does_not_grow_and_leaves_no_hook[prompt": "compiled code sets its hook at each call",
    "test_it_is_told": "what comes to require grad later inside compiled code has no gradient to tell",
    "test_a_region_recomputed_while_another_run_is_in_progress_gets_the_value_of_its_own": "compiled code stays eager",
    "test_reading_it_is_refused_with_the_reason": VIEWS,
    "test_other_views_are_refused": VIEWS,
    "test_odd_tensors_are_kept_exactly": "what graphs tell is copied at once",
    "test_what_was_freed_is_refused_and_never_read": "what graphs tell is copied at once",
    "test_receipts_do_not_wait_for_the_device_until_they_are_read": "compiling reads numbers",
    "test_double_backward_goes_through_edits_of_gradients": "torch compiles no double backward",
    "test_what_an_edit_may_not_return_is_refused_at_the_site[in place]": "in a graph it writes into a copy",
    "test_no_cross_talk": "torch cannot compile a model whose hooks another thread changes meanwhile",
    "test_weights_with_a_loss_on_the_features_of_the_first_run": "graphs mark what the model returns, and nothing inside",
    "test_a_tensor_that_is_written_to_by_one_with_grad_has_no_gradient": "a graph tells one reason for None",
    "test_what_torch_cannot_read_is_refused_when_it_is_read": "torch compiles no such tensor",
    "test_view_without_grad.py::test_what_a_module_returns": "torch compiles no such view",
    "test_gaff_is_right_or_says_why_not[gradients.gradient_of_a_view_that_is_written_to]": VIEWS,
    "test_gaff_is_right_or_says_why_not[traceless.model_is_as_before]": "compiling leaves an attribute of torch's own",
    "test_an_edit_that_fails_inside_is_told_when_the_run_ends": HANDLED,
    "test_tensors_in_attributes_beside_are_told": "compiled code tells what a class says that it holds, nothing beside",
    "test_a_capture_or_a_feature_that_fails_inside_is_told": HANDLED,
    "test_function_modes.py::test_what_is_kept_is_what_passed": "torch compiles no function mode of others",
    "test_kept_values_have_no_tangent": "torch compiles no forward-mode AD",
    "test_gaff_is_right_or_says_why_not[edits.edit_in_a_model_that_differentiates]": "torch compiles no double backward",
    "test_sparse_gradients_inside_a_graph": "torch compiles no sparse gradients",
}


HOOKS = "it counts all hooks, and torch has its own there"
COPIES = "torch lets nobody copy or pickle such a model"
PARTS = "FSDP2 puts another parameter in place of the one that the test holds"
SPARSE = "torch reduces no sparse gradients there"
THREADS = "processes must call their models in one order, and threads keep none"
AGAIN = "FSDP2 knows no double backward"
INNER = "FSDP2 knows backward passes that begin at what the model returned"
OWN = "FSDP2 gives each run an input of its own"

SPREAD_OVER = ("fsdp2", "ddp")  # which torchrun runs
DEVICES = ("cuda", "cpu")  # that tests make their tensors on by default; cpu: only that a default is set at all
NAMES = "torch gives the class a name of its own there"

SPREAD = {
    "test_nothing_remains_after_ctrl_c": HOOKS,
    "test_nothing_stays_once_the_graph_is_freed": HOOKS,
    "test_released_edits_raise_in_backward": HOOKS,
    "test_the_users_exception_is_never_masked": HOOKS,
    "test_a_failing_reduction_raises_in_the_library": HOOKS,
    "test_closing_a_generator_closes_its_session": HOOKS,
    "test_sessions_close_in_any_order": HOOKS,
    "test_vmap_and_grad_are_refused_with_the_reason": HOOKS,
    "test_a_closed_session_leaves_no_hook_and_no_attribute": HOOKS,
    "test_the_copy_is_not_watched": COPIES,
    "test_the_pickle_is_not_watched": COPIES,
    "test_a_forward_of_the_users_own_is_copied_with_the_module": COPIES,
    "test_a_skipped_module_is_copied_and_pickled_as_it_was": COPIES,
    "test_attached_edits_stay_until_removed": COPIES,
    "test_gaff_is_right_or_says_why_not[traceless.pickle_afterwards]": COPIES,
    "test_gaff_is_right_or_says_why_not[traceless.pickle_during]": COPIES,
    "test_gaff_is_right_or_says_why_not[traceless.deepcopy_during]": COPIES,
    "test_gaff_is_right_or_says_why_not[traceless.model_is_as_before]": NAMES,
    "test_gaff_is_right_or_says_why_not[traceless.model_that_raises]": HOOKS,
    "test_strength_is_mixed_or_refused": SPARSE,
    "test_sparse_gradients": SPARSE,
    "test_a_mode_of_the_program_sees_what_the_program_does": "a mode sees the exchange of gradients, too",
    "test_a_fake_value_is_kept_as_one": "processes exchange no fake values",
    "test_a_parameter_that_another_tensor_was_swapped_into_is_refused": "torch swaps no tensor that it holds elsewhere",
    "test_a_factor_for_each_row_of_a_sparse_gradient": SPARSE,
    "test_several_edits_of_a_sparse_gradient": SPARSE,
    "test_export_and_script_after_use": "torch scripts no such model",
    "test_function_modes.py::test_what_is_kept_is_what_passed": "a mode sees the exchange of gradients, too",
    "test_nothing_stays_where_warnings_are_errors": HOOKS,
    "test_lazy_is_refused_with_the_way_out": "torch refuses there what is not initialised",
    "test_it_is_refused_before_anything_is_installed": NAMES,
}

UNITS = "gaff.take gives with gradients what a unit of FSDP2 returns"
SHARDED = {
    "test_what_a_forward_copies_or_saves_is_the_parameter_itself": COPIES,
    "test_steps_that_a_scaler_skipped_are_no_steps": "the session shards it when its optimizer is made",
    "test_what_breaks_off_in_the_middle_gives_the_parameter_back": PARTS,
    "test_edits_of_several_sessions_stand_in_one_upon_the_other": PARTS,
    "test_a_checkpointed_function_is_recomputed_with_what_stood_in": PARTS,
    "test_code_that_changes_while_something_stands_as_forward_runs[recompiled": NO_COPY,
    "test_shares_on_a_device_without_autocast": NO_NUMBERS,
    "test_a_function_mode_of_the_program_sees_and_changes_what_the_program_does": "the mode sees what FSDP2 does, too",
    "test_graphs_of_functorch_are_refused": "torch makes no such graph of what is sharded",
    **SPREAD,
    "test_weights_that_were_tied_when_the_session_was_opened": "FSDP2 takes no plain weights for its own",
    "test_no_cycle_holds_the_values": UNITS,
    "test_a_capture_or_a_feature_that_fails_inside_is_told": UNITS,
    "test_the_gradient_of_the_old_one_is_still_told_where_another_stands_in_for_a_while": PARTS,
    "test_what_stands_in_and_is_no_leaf_has_a_gradient_of_its_own": PARTS,
    "test_an_edit_inside_a_parametrisation_is_refused_where_torch_keeps_what_that_makes": PARTS,
    "test_a_gradient_inside_a_parametrisation_is_edited_though_torch_keeps_what_that_makes": PARTS,
    "test_a_long_session_at_a_leaf_does_not_grow_and_leaves_no_hook": OWN,
    "test_a_run_too_long_over_is_refused_and_never_told_as_another": INNER,
    "test_what_a_run_has_kept_and_not_returned_is_its_own_after_others_have_begun": INNER,
    "test_what_a_run_makes_of_what_another_has_kept_is_told_to_none_of_them": INNER,
    "test_an_image_whose_features_a_hook_collects_gets_the_total_of_each_step": OWN,
    "test_a_part_that_is_torchscript_is_left_out_and_the_rest_is_told": "torch shards no TorchScript",
    "test_a_parameter_that_is_frozen_when_the_session_opens_is_heard_of_once_it_is_not": PARTS,
    "test_clip_of_a_single_number_in_half_precision": "FSDP2 shards no single numbers",
    "test_jit_trace_is_refused": "torch traces no sharded module",
    "test_attributes_of_parameters.py": "what FSDP2 gathers has no attributes of the parameter",
    "test_parameters_stay_where_they_are": PARTS,
    "test_an_edit_of_an_output_leaves_the_dict_that_the_module_keeps": PARTS,
    "test_two_edits_of_one_parameter_compose": PARTS + "; its values are those of test_sharded",
    "test_sessions_closed_in_any_order_give_the_parameter_back": PARTS,
    "test_what_jumps_out_of_the_model_leaves_the_parameter": PARTS,
    "test_an_edit_that_raises_leaves_the_parameters_of_the_others": PARTS,
    "test_a_parameter_is_stood_in_for_everywhere_and_never_written_to": PARTS,
    "test_a_failing_run_gives_the_parameter_back": PARTS,
    "test_the_gradient_is_that_of_the_new_parameter": PARTS,
    "test_a_gradient_of_no_run_is_told_as_one_however_many_there_were[an earlier forward": "it is sharded by the session",
    "test_a_gradient_of_no_run_is_told_as_one_however_many_there_were[the parameter alone": INNER,
    "test_all_that_stand_in_for_a_parameter_are_followed": "FSDP2 takes DTensors in place of its parameters",
    "test_what_stood_in_for_a_parameter_is_freed": "FSDP2 takes DTensors in place of its parameters",
    "test_steps_are_those_of_the_models_own_optimizer": PARTS,
    "test_when_limits_an_edit_to_runs_calls_and_steps": PARTS,
    "test_scaled_gradients_are_shown_as_they_are": PARTS,
    "test_what_a_module_returns_of_its_weight_after_a_step": PARTS,
    "test_tensors_and_parameters_tell_the_edited_gradient_whoever_came_first": "FSDP2 gives its unit an alias of an input",
    "test_weights_of_every_step": "what FSDP2 gathers is copied at once, by reference too",
    "test_an_edit_that_would_be_lost_is_refused": "FSDP2 takes DTensors in place of its parameters",
    "test_what_is_handed_on_and_what_the_whole_model_is_given_are_edited": "FSDP2 takes DTensors in place of its parameters",
    "test_gradients_are_those_of_the_bare_run": "torch keeps no addresses of the lists that FSDP2 works on",
    "test_noise_of_gradients_is_drawn_anew_for_each_backward_pass": "a further pass adds to what FSDP2 tells later",
    "test_an_address_that_names_nothing_raises": NAMES,
    "test_bad_input_is_refused_before_anything_is_installed": NAMES,
    "test_gradient_penalty_has_bare_bits": AGAIN,
    "test_double_backward_goes_through_edits_of_gradients": AGAIN,
    "test_gradients_in_parts_are_refused": "FSDP2 brings a parameter's gradient in one part",
    "test_an_edit_of_a_gradient_that_comes_in_tiles_is_refused": "FSDP2 brings a parameter's gradient in one part",
    "test_a_parameter_in_a_closure_that_is_handed_on": PARTS,
    "test_a_parameter_that_is_unfrozen_or_replaced_between_runs": PARTS,
    "test_one_backward_for_two_runs_is_told_to_both": OWN,
    "test_a_pass_that_no_run_is_known_of_is_refused_where_several_met_the_leaf": OWN,
    "test_hooks_on_a_leaf_of_many_runs_stay_few": OWN,
    "test_passes_beyond_the_first_sixty_are_still_known": OWN,
    "test_the_copy_that_autocast_keeps_of_a_leaf_is_refused": OWN,
    "test_hooks_for_it_leave_a_leaf_and_hold_no_graph": OWN,
    "test_hooks_on_a_leaf_that_serves_many_runs_go_with_their_graphs": OWN,
    "test_what_a_users_hook_has_collected_inside_is_not_from_outside": INNER,
    "test_an_edit_meant_for_one_of_two_runs_acts_once_on_their_total": OWN,
    "test_an_edit_acts_once_for_each_run_whatever_the_input_is": OWN,
    "test_a_leaf_that_another_run_met_does_not_take_a_pass_from_its_run": OWN,
    "test_a_leaf_that_several_runs_met_without_a_mark_is_refused": OWN,
    "test_leaves_of_two_runs_with_a_loss_on_features": INNER,
    "test_edits_of_leaves_of_two_runs_are_made": INNER,
    "test_weights_with_a_loss_on_the_features_of_the_first_run": INNER,
    "test_a_loss_on_a_weight_alone_is_of_no_run": INNER,
    "test_parameter_held_elsewhere.py": PARTS,
    "test_share_of_second_order.py": AGAIN,
    "test_an_input_that_is_written_to_without_grad_mode_and_returned": "its gradient is read off a sharded weight",
    "test_view_without_grad.py::test_what_a_module_returns": "FSDP2 asks such a view whether it requires grad",
    "test_two_forwards_before_their_backwards_keep_their_runs": "calls a part of the model that is not gathered then",
    "test_self_attention": "FSDP2 shards no container",
    "test_no_cross_talk": THREADS,
    "test_another_threads_run_does_not_fire_by_default": THREADS,
    "test_all_threads_on_request_and_runs_kept_apart": THREADS,
    "test_another_thread_does_not_get_the_edited_value": THREADS,
}


REENTRANT = "DistributedDataParallel takes no reentrant checkpoints of shared modules"
FROZEN = "DistributedDataParallel takes no model without a parameter that is trained"
UNUSED = "DistributedDataParallel refuses parameters that get no gradient"

REPLICATED = {
    "test_an_image_whose_features_a_hook_collects_gets_the_total_of_each_step": UNUSED,
    "test_a_run_of_which_one_output_is_gone_still_has_its_pass": "DDP wants all that a model returns in each pass",
    "test_edits_of_several_sessions_stand_in_one_upon_the_other": "DistributedDataParallel wants every parameter used",
    "test_a_checkpointed_function_is_recomputed_with_what_stood_in": "DistributedDataParallel wants a pass for each run",
    "test_code_that_changes_while_something_stands_as_forward_runs[recompiled": NO_COPY,
    "test_shares_on_a_device_without_autocast": NO_NUMBERS,
    "test_a_gradient_of_no_run_is_told_as_one_however_many_there_were[an earlier forward": "the session replicates it",
    **SPREAD,
    "test_a_trainable_edit_trains_through_a_checkpoint": FROZEN,
    "test_a_module_as_an_edit_trains_while_the_model_is_frozen": FROZEN,
    "test_checkpoints_inside_checkpoints[False-True": REENTRANT,
    "test_gradients_are_those_of_the_edited_model_without_checkpointing[reentrant": REENTRANT,
    "test_reverse_and_stop_at_values_and_at_gradients": "DistributedDataParallel misses the gradients that an edit stops",
    "test_all_threads_on_request_and_runs_kept_apart": THREADS,
    "test_no_cross_talk": THREADS,
    "test_a_pass_that_a_forward_runs_itself_in_a_checkpoint[True": "DistributedDataParallel takes one pass for a parameter",
    "test_what_was_made_for_nothing_costs_no_share": UNUSED,
    "test_hooks_for_it_leave_a_leaf_and_hold_no_graph": UNUSED,
}


CONSTANTS = "it compares with tensors that were made on the CPU when its file was imported"
REFERENCE = "what is written to later is refused there, unless a module works in place"
OTHER_THREAD = "torch runs a device's backward passes on a thread of its own, where a forward's own pass is refused"
BY_REFERENCE = "what a later session keeps is the module's own tensor there, which is no second one of the module"
ARRAYS = "NumPy sees no memory of a GPU"
AUTOCAST = "it switches on autocast of the CPU"
KEPT = "it looks at how values of the CPU are kept"
COPIED = "values of a model that works in place are copied there"
PAST_TORCH = "there is no copy-on-write there that tells what is written past the version counter"
SHARED = "readers share what is kept there"
ONE_THREAD = "the device on which tests make their tensors is that of one thread"

ON_GPU = {
    "test_reading_a_changed_argument_is_refused_and_clone_helps": COPIED,
    "test_a_model_that_changes_the_parameter_in_its_forward_is_refused[past torch]": PAST_TORCH,
    "test_a_model_that_changes_the_parameter_in_its_forward_is_refused[by NumPy]": ARRAYS,
    "test_no_cross_talk": ONE_THREAD,
    "test_what_is_read_can_be_written_into": SHARED,
    "test_writes_do_not_stay": SHARED,
    "test_a_skipped_module_is_not_run[tensor]": CONSTANTS,
    "test_what_an_edit_may_not_return_is_refused_at_the_site[device]": "it is the other device there",
    "test_an_edit_does_what_the_same_change_by_hand_does[second": CONSTANTS,
    "test_gradients_of_weights_at_outputs_and_of_plain_tensors[project away]": CONSTANTS,
    "test_resampling_takes_rows_of_the_reference": CONSTANTS,
    "test_a_step_with_everything_captured_has_the_bits_of_a_bare_one[recurrent-False]": "cuDNN refuses its backward",
    "test_a_numpy_view_of_an_argument_still_follows_it": ARRAYS,
    "test_memory_of_numpy.py": ARRAYS,
    "test_the_numpy_view_follows": ARRAYS,
    "test_dtypes_are_those_that_passed": AUTOCAST,
    "test_nothing_after_the_last_site_runs": AUTOCAST,
    "test_the_copy_that_autocast_keeps_of_a_leaf_is_refused": AUTOCAST,
    "test_parameters_stay_where_they_are": ARRAYS,
    "test_a_factor_for_each_row_of_a_sparse_gradient": CONSTANTS,
    "test_no_cycle_holds_the_values": KEPT,
    "test_no_value_is_refused_for_somebody_elses_memory": REFERENCE,
    "test_unknown_objects_are_left_out_and_can_be_reached_by_key": REFERENCE,
    "test_it_keeps_what_passed": REFERENCE,
    "test_gaff_is_right_or_says_why_not[values.output_that_the_caller_overwrites]": REFERENCE,
    "test_gaff_is_right_or_says_why_not[values.view_whose_base_changes_later]": REFERENCE,
    "test_a_pass_that_a_forward_runs_itself_is_no_part_of_its_share[scale-False]": OTHER_THREAD,
    "test_a_pass_that_a_forward_runs_itself_is_no_part_of_its_share[stop-False]": OTHER_THREAD,
    "test_tensors_in_attributes_beside_are_told_by_their_own_address_only": REFERENCE,
    "test_gradients_are_those_of_the_bare_run[module-options0]": REFERENCE,
    "test_gradients_are_those_of_the_bare_run[module-options1]": REFERENCE,
    "test_what_is_computed_from_a_kept_value_is_no_part_whoever_came_first[2:grad_input-False]": BY_REFERENCE,
    "test_a_subclass_that_cannot_be_measured_is_refused": "torch's masked tensors do not bear a default device",
    "test_models_that_catch.py": CONSTANTS,
    "test_flops_of_functions_in_an_operator_and_of_what_has_no_shape": "it counts the operations of the CPU",
    "test_logits_that_are_closed_on_purpose_are_no_alarm": CONSTANTS,
    "test_share_corners.py": CONSTANTS,
    "test_everything_is_as_before": ARRAYS,
}
COMPILED_ON_GPU = {
    "test_gaff_is_right_or_says_why_not[edits.edit_that_draws_numbers_under_a_checkpoint]": "so does torch by itself",
    "test_infinities_of_one_small_float_in_another": "torch's own kernels there make other numbers of infinities",
}


def why(nodeid, where):
    """Why a test means something else there; None where it means the same."""
    file_and_name = nodeid.rpartition("/")[2]
    name = file_and_name.partition("::")[2]
    others = {"fsdp2": SHARDED, "ddp": REPLICATED, "cuda": ON_GPU, "cpu": {}}
    different = {key: why for part in where.split(":") for key, why in others.get(part, COMPILED).items()}
    different |= COMPILED_ON_GPU if where.startswith("cuda:") else {}
    found = (reason for part, reason in different.items() if name.startswith(part) or file_and_name.startswith(part))
    return next(found, None)


@contextlib.contextmanager
def compiled(monkeypatch, backend):
    """Sessions are opened on compiled models."""

    def change(model):
        if model._compiled_call_impl is None:
            model.compile(backend=backend)

    torch._dynamo.reset()
    _before_sessions(monkeypatch, change)
    drawing = contextlib.nullcontext()
    if backend == "inductor":  # which rounds in other places, and draws other numbers
        monkeypatch.setattr(torch, "equal", _together(torch.equal, is_rounded=True))
        drawing = importlib.import_module("torch._inductor.config").patch(fallback_random=True)
    with drawing:
        yield
    torch._dynamo.reset()


@contextlib.contextmanager
def on_device(where, monkeypatch):
    """Tests make their models and their data there, but for what comes from numpy or names a device."""
    device, _, backend = where.partition(":")
    torch.set_default_device(device)
    with compiled(monkeypatch, backend) if backend else contextlib.nullcontext():
        yield
    torch.set_default_device(None)


@contextlib.contextmanager
def spread(monkeypatch, where):
    """Sessions are opened on models that are sharded or replicated over all processes.

    What tests compare is put together, and parts mix with plain tensors. All processes have the same numbers: averages
    over them are what one process has.
    """
    from torch.distributed.tensor.experimental import implicit_replication

    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    for owner, name in ((torch, "equal"), (torch, "allclose"), (torch.testing, "assert_close")):
        monkeypatch.setattr(owner, name, _together(getattr(owner, name)))
    _before_sessions(monkeypatch, _shard if where == "fsdp2" else _replicate)
    with implicit_replication():
        yield


def _shard(model):
    from torch.distributed.fsdp import fully_shard

    if not type(model).__name__.startswith("FSDP") and next(model.parameters(), None) is not None:
        fully_shard(model)


def _replicate(model):
    """DistributedDataParallel by hooks on the model itself, which the test goes on calling."""
    from torch.distributed._composable import replicate

    if not type(model).__name__.startswith("DDP") and any(one.requires_grad for one in model.parameters()):
        replicate(model)
        replicate.state(model).lazy_init()  # at once: it writes into parameters


def _together(compare, *, is_rounded=False):
    """Of whole tensors; a truth that parts were multiplied for is rounded otherwise, as all may be."""

    def compare_whole(one, other, *rest, **options):
        if compare.__name__ == "equal" and (is_rounded or _is_part(one) or _is_part(other)):
            one, other = _whole(one), _whole(other)
            is_alike = (one.shape, one.dtype) == (other.shape, other.dtype)
            return is_alike and torch._C._VariableFunctions.allclose(one, other, 1e-5, 1e-6, True)
        return compare(_whole(one), _whole(other), *rest, **options)

    return compare_whole


def _is_part(value):
    return hasattr(value, "full_tensor")


def _whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _before_sessions(monkeypatch, change):
    for kind in (gaff.sessions.capture.Capture, gaff.sessions.edit.Editing):

        def init(self, model, *args, own=kind.__init__, **kwargs):
            if isinstance(model, torch.nn.Module):
                change(model)
            own(self, model, *args, **kwargs)

        monkeypatch.setattr(kind, "__init__", init)


def leave_together(code):
    """End this process once all ranks have come here; does nothing where there is one process only.

    gloo aborts a process whose peer goes away, and at times one that takes its process group down.
    """
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
