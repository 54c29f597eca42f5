"""Tests that mean something else when every model is compiled (``pytest --inside aot_eager``), and why."""

IN_GRAPH = (
    "a checkpoint inside compiled code keeps its edits in the graph: nothing stays on modules, nothing is released"
)
REFUSED = "an edit in compiled code under a checkpoint around it is refused at closing while its backward has not run"
VIEWS = "compiled code refuses the gradient of a view in words of its own"

DIFFERENT = {
    "test_a_closed_session_leaves_no_hook_and_no_attribute": "compiling leaves an attribute of torch's own",
    "test_reading_a_changed_argument_is_refused_and_clone_helps": "what graphs tell is copied at once",
    "test_a_bare_forward_after_the_session_stays_bare_while_the_first_loss_is_alive": IN_GRAPH,
    "test_nothing_stays_once_the_graph_is_freed": IN_GRAPH,
    "test_released_edits_raise_in_backward": IN_GRAPH,
    "test_released_edits_raise_also_for_a_loss_that_was_put_aside": IN_GRAPH,
    "test_gradients_in_parts_are_refused": "compiled code brings a parameter's gradient in one part",
    "test_a_module_called_inside_a_backward_pass_is_refused": "compiled code runs its edits wherever it is called",
    "test_an_edit_that_cannot_be_repeated_raises": "compiled code repeats it: the edit is part of the graph",
    "test_the_whole_model_under_one_checkpoint": REFUSED,
    "test_gradients_are_those_of_the_edited_model_without_checkpointing[selective": "torch compiles no such checkpoint",
    "test_a_tensor_that_changes_before_the_recomputation_raises": "torch raises an error of its own",
    "test_an_attached_plan_is_a_context_too_and_tells_the_error_of_the_edit_only": "torch tells errors while tracing",
    "test_jit_trace_is_refused": "torch refuses to script what is compiled",
    "test_a_site_inside_fires_and_the_receipt_says_not_bitwise": "the receipt tells of compiled code",
    "test_a_site_outside_leaves_the_fast_path_alone": "the receipt tells of compiled code",
    "test_recursion_is_one_run": "a model that calls itself inside compiled code is refused",
    "test_it_is_told": "what comes to require grad later inside compiled code has no gradient to tell",
    "test_a_region_recomputed_while_another_run_is_in_progress_gets_the_value_of_its_own": "compiled code stays eager",
    "test_reading_it_is_refused_with_the_reason": VIEWS,
    "test_other_views_are_refused": VIEWS,
    "test_odd_tensors_are_kept_exactly": "what graphs tell is copied at once",
    "test_receipts_do_not_wait_for_the_device_until_they_are_read": "compiling reads numbers",
    "test_double_backward_goes_through_edits_of_gradients": "torch compiles no double backward",
    "test_what_an_edit_may_not_return_is_refused_at_the_site[in place]": "in a graph it writes into a copy",
    "test_no_cross_talk": "torch cannot compile a model whose hooks another thread changes meanwhile",
}


def why(name):
    return next((reason for part, reason in DIFFERENT.items() if name.startswith(part)), None)
