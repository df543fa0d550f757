"""SGLang's failures: what names a cause in its log, and what only sounds like one."""

import re

from autotuner.engines.diagnosis import LOOK, TOLD_TO_STOP, signature

# Lines that hold frightening words in a healthy start. The dump of the arguments may hold any word at all.
BENIGN = re.compile(
    r"server_args=|Ignore import error|Failed to import|Proceeding without generation config|to set RLIMIT"
    r"|falling back|freeze_gc failed|destroy_process_group|resource_tracker|errno: 97|NCCL INFO|py-spy"
    r"|Watchdog \w+ initialized|(?:Future|User|Deprecation|Runtime)Warning|\s{4}raise \w"
)

# The log of a server that speculates: only there can a size mismatch be the drafter's.
DRAFTING = re.compile(
    r"speculative_algorithm['\"]?\s*[=:]\s*['\"]\w|eagle_worker|draft_worker|draft model|_eagle3?\.py"
)

_LOWER = "lower mem-fraction-static, or the largest graph batch size (cuda-graph-max-bs)"
_WHOLE_LOG = "the first rank's traceback by time is the cause; what other ranks say after it is its echo"

DRAFT_SIGNATURES = (
    signature(
        "draft-mismatch",
        r"size mismatch for|KeyError: '[\w.]+\.weight'",
        "the drafter's weights do not fit the model class that SGLang chose for it",
        "use a drafter made for this very target, or a newer SGLang; it is not a matter of memory",
    ),
)

SIGNATURES = (
    signature(
        "kv-pressure",
        r"(?:Prefill|Extend|Decode) out of memory\b",
        "the KV pool ran out of slots while it served",
        "lower max-running-requests or chunked-prefill-size, or give the pool more memory",
    ),
    signature(
        "bad-flag-combination",
        r"User-specified context_length",
        "a longer context was asked for than the model allows",
        "use the length that the message derives; the override variable only hides it",
    ),
    signature(
        "unsupported",
        r"error: argument \S+ invalid choice|[Uu]n(?:known|supported) speculative|is not a valid speculative",
        "this SGLang does not know the value of a flag",
        "use a newer SGLang, or one of the values it lists; it says nothing of the method's speed",
    ),
    signature(
        "bad-flag-combination",
        r"error: (?:unrecognized arguments|ambiguous option|argument |the following arguments are required)",
        "SGLang refused a flag",
        "compare with --help of this very version; the flags for CUDA graphs were renamed in 0.5.15",
    ),
    signature(
        "bad-flag-combination",
        r"selected index k out of range",
        "speculative-num-draft-tokens is more than steps and top-k can yield",
        "lower speculative-num-draft-tokens, or raise speculative-eagle-topk",
    ),
    signature(
        "draft-mismatch",
        r"hidden_states\.shape\[-1\] == input_embeds\.shape\[-1\]",
        "the drafter's hidden size does not fit the target's",
        "use a drafter made for this very target",
    ),
    signature(
        "draft-mismatch",
        r"Target model's context_length",
        "the drafter was made for a shorter context than the target's",
        "set context-length to the drafter's; the override variable hides it, and acceptance falls there",
    ),
    signature(
        "bad-flag-combination",
        r"Cannot find the config file for",
        "the drafter inherited the target's quantization, which its weights do not have",
        'set speculative-draft-model-quantization = "unquant"',
    ),
    signature(
        "unsupported",
        r"are not supported for now",
        "this SGLang does not know the model's (or the drafter's) architecture",
        "use a newer SGLang, or another model",
    ),
    signature(
        "unsupported",
        r"size mismatch for|SafetensorError|Error while deserializing header|MetadataIncompleteBuffer",
        "the weights are damaged, cut short, or do not fit the model class",
        "compare the files' sizes and hashes with their source",
    ),
    signature(
        "bad-flag-combination",
        r"Repo id must be in the form|FileNotFoundError.{0,300}(?:config\.json|safetensors|tokenizer)"
        r"|couldn't connect to 'https://|Cannot find any model weights",
        "the model was not found where launch.model points",
        "check the path; a host without network needs a local folder",
    ),
    signature(
        "kv-too-small",
        r"Not enough memory\. Please try to increase|leave no GPU memory for the KV cache"
        r"|state cache is too small",
        "nothing is left for the key-value cache once the weights are loaded",
        "RAISE mem-fraction-static (in graph capture one lowers it), shorten the context, or use more GPUs",
    ),
    signature(
        "oom-in-capture",
        r"graph failed:.{0,300}out of memory",
        "the GPU ran out of memory while capturing CUDA graphs",
        _LOWER,
    ),
    signature(
        "device-busy",
        r"memory capacity is unbalanced",
        "one GPU has less free memory than the others",
        "look for another process on it (nvidia-smi); often the previous server has not ended yet",
        weak=True,  # an error or a mere warning, by version
    ),
    signature(
        "device-busy",
        r"[Pp]ort (?:is already in use|\S+ is not available)|EADDRINUSE",
        "a port that SGLang needs was already taken",
        "find the process that holds it; a server that was killed a moment ago may still do",
    ),
    signature(
        "watchdog-timeout",
        r"[Ww]atchdog timeout \(",
        "a forward pass took longer than watchdog-timeout, so SGLang ended itself",
        "look at the stacks it printed; a collective that waits for a dead rank is the usual cause",
    ),
    signature(
        "collective-timeout",
        r"Watchdog caught collective operation timeout",
        "a collective operation between the GPUs timed out",
        "one rank was slow or dead: look for its own error above; on PCIe, peer-to-peer access is a suspect",
    ),
    signature(
        "rank-skew",
        r"other ranks that didn't finish",
        "one rank loaded its weights so slowly that the others gave up",
        "a slow or shared disk: load once to warm the page cache, or copy the model to a local disk",
    ),
    signature(
        TOLD_TO_STOP,
        r"SIGTERM received",
        "somebody other than autotuner told the server to stop",
        LOOK,
        weak=True,  # an exception before it is the cause
    ),
    signature(
        "host-oom",
        r"Error while creating shared memory segment|No space left on device",
        "the shared memory or a disk is full",
        "clear what dead servers left in /dev/shm, or give the container a larger one",
    ),
    signature(
        "capture-failed-other",
        r"graph failed:",
        "the capture of CUDA graphs failed, and not for lack of memory",
        _WHOLE_LOG,
    ),
    signature(
        "unknown",
        r"illegal memory access|device-side assert|CUDA error|nccl(?:UnhandledCuda|System|Internal)Error"
        r"|DistBackendError|memory leak detected!",
        "a rank died of a GPU or communication error",
        _WHOLE_LOG,
    ),
    signature(
        "host-oom",
        r"(?:exit code:?|exited with) -9\b",
        "a process of the server was killed (SIGKILL)",
        "look for the OOM killer in the kernel log (dmesg): loading in parallel takes host memory",
        weak=True,
    ),
    signature(
        "bad-flag-combination",
        r"server_args\.py\W.{0,99} in (?:__post_init__|check_server_args|_handle_\w+)"
        r"|/arg_groups/.{0,99} in \w",
        "SGLang refused the combination of flags",
        "the last line of its traceback names the rule",
        weak=True,
    ),
    signature("unknown", r"Initialization failed\. warmup error", "the warm-up request failed", _WHOLE_LOG, weak=True),
    signature("unknown", r"hit an exception", "a process of the server raised an exception", _WHOLE_LOG, weak=True),
    signature("unknown", r"exit code:? -(?:3|6|7|11)\b", "a process of the server aborted", _WHOLE_LOG, weak=True),
    signature("unknown", r"Received sigquit|SIGQUIT received", "a process of the server died", _WHOLE_LOG, weak=True),
    signature(
        "no-output",
        r"couldn't get a response from detokenizer",
        "the server stopped answering",
        _WHOLE_LOG,
        weak=True,
    ),
)
