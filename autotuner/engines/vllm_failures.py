"""vLLM's failures: what names a cause in its log, and what only sounds like one."""

import re

from autotuner.engines.diagnosis import LOOK, TOLD_TO_STOP, signature
from autotuner.engines.vocabulary import Action

# Lines that hold frightening words in a healthy server. The dumps of arguments may hold any word at all.
BENIGN = re.compile(
    r"non-default args:|\) with config: |shared memory broadcast block|resource_tracker|destroy_process_group"
    r"|NCCL INFO|Custom allreduce is disabled|WorkerProc was terminated|KeyboardInterrupt: terminated"
    r"|Ignore import error|Failed to import|falling back|ulimit|(?:Future|User|Deprecation|Runtime)Warning"
    r"|\s{4}raise \w"
)

# The log of a server that speculates: only there can a size mismatch be the drafter's.
DRAFTING = re.compile(r"SpeculativeConfig\(|'speculative_config': \{|Loading drafter model|/spec_decode/|_eagle3?\.py")

_ABOVE = "take the first traceback of a Worker or EngineCore process; what follows it is its echo"

DRAFT_SIGNATURES = (
    signature(
        "draft-mismatch",
        r"size mismatch for|KeyError: '[\w.]+\.weight'",
        "the drafter's weights do not fit the model class that vLLM chose for it",
        "use a drafter made for this very target, or a newer vLLM; it is not a matter of memory",
    ),
)

SIGNATURES = (
    signature(
        "unsupported",
        r"type=literal_error",
        "this vLLM does not know the value of an option",
        "use another release, or one of the values it lists; it says nothing of the method's speed",
    ),
    signature(
        "unsupported",
        r"error: argument \S+ invalid choice|[Uu]n(?:known|supported) speculative|is not a valid speculative",
        "this vLLM does not know the value of a flag",
        "use a newer vLLM, or one of the values it lists; it says nothing of the method's speed",
    ),
    signature(
        "state-slots-limit",
        r"exceeds available Mamba cache blocks",
        "there are fewer recurrent-state blocks than running requests were asked for",
        "lower max-num-seqs below the number it names, or raise gpu-memory-utilization",
    ),
    signature(
        "bad-flag-combination",
        r"error: (?:unrecognized arguments|ambiguous option|argument |the following arguments are required)",
        "vLLM refused a flag",
        "compare with `vllm serve --help=all` of this very version",
    ),
    signature(
        "draft-mismatch",
        r"should have the same vocabulary size|does not support EAGLE3 interface"
        r"|draft_tensor_parallel_size.{0,99} cannot be other"
        r"|hidden_states\.shape\[-1\] == input_embeds\.shape\[-1\]",
        "the drafter and the target do not fit each other",
        "the line below names the rule; use a drafter made for this very target",
    ),
    signature(
        "bad-flag-combination",
        r"num_speculative_tokens\S* must be divisible"
        r"|num_speculative_tokens (?:was|must be) (?:not )?provided|provided but without speculative model"
        r"|max_num_batched_tokens .{0,99}(?:too small|is smaller)|Model Runner V2 does not support",
        "vLLM refused the combination of flags",
        "the line below names the rule",
    ),
    signature(
        "bad-flag-combination",
        r"Invalid repository ID or local directory|Repo id must be in the form|Cannot find any model weights"
        r"|couldn't connect to 'https://|FileNotFoundError.{0,300}(?:config\.json|safetensors)",
        "the model was not found where launch.model points",
        "check the path; a host without network needs a local folder",
    ),
    signature(
        "unsupported",
        r"are not supported for now|was supported in vLLM until",
        "this vLLM does not know the model's (or the drafter's) architecture",
        "use another version of vLLM, or another model",
    ),
    signature(
        "unsupported",
        r"size mismatch for|SafetensorError|Error while deserializing header|MetadataIncompleteBuffer",
        "the weights are damaged, cut short, or do not fit the model class",
        "compare the files' sizes and hashes with their source",
    ),
    signature(
        "device-busy",
        r"Free memory on device .{0,300} is less than desired GPU memory utilization",
        "another process holds GPU memory, often the previous server",
        "launch again once the memory is back, or lower gpu-memory-utilization",
    ),
    signature(
        "kv-too-small",
        r"No available memory for the cache blocks|To serve at least one request with the model",
        "too little is left for the key-value cache once the weights are loaded",
        "RAISE gpu-memory-utilization, or lower max-model-len; the line below may name the length that fits",
    ),
    signature(
        "oom-in-load",
        r"OutOfMemoryError|CUDA out of memory|not enough GPU memory",
        "the GPU ran out of memory",
        "lower gpu-memory-utilization, max-num-seqs or the largest CUDA graph (max-cudagraph-capture-size)",
    ),
    signature(
        "device-busy",
        r"Error in memory profiling",
        "GPU memory was released by another process while vLLM measured it",
        "no fault of the candidate: launch again once the previous server is gone",
    ),
    signature(
        "watchdog-timeout",
        r"RPC call to \w+ timed out",
        "a step took longer than VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS (300 s)",
        "a rank hung; on PCIe suspect peer-to-peer access (disable-custom-all-reduce, NCCL_P2P_DISABLE)",
    ),
    signature(
        "collective-timeout",
        r"Watchdog caught collective operation timeout",
        "a collective operation between the GPUs timed out",
        "one rank was slow or dead: look for its own error above; on PCIe, peer-to-peer access is a suspect",
    ),
    signature(
        "watchdog-timeout",
        r"Timed out waiting for engine",
        "the engine was not ready within VLLM_ENGINE_READY_TIMEOUT_S",
        "raise it above the load's time; processes of this server may still hold the GPUs",
        action=Action.FIX_FLAGS,
    ),
    signature(
        "unknown",
        r"illegal memory access|device-side assert|CUDA error|NCCL error|nccl(?:UnhandledCuda|System)Error"
        r"|DistBackendError",
        "a rank died of a GPU or communication error",
        _ABOVE,
    ),
    signature(
        "host-oom",
        r"exit ?code:? -9\b",
        "a process of the server was killed (SIGKILL)",
        "look for the OOM killer in the kernel log (dmesg): loading in parallel takes host memory",
        weak=True,
    ),
    signature("unknown", r"exit ?code:? -(?:6|7|11)\b", "a process of the server aborted", _ABOVE, weak=True),
    signature(
        "bad-flag-combination",
        r"validation errors? for \w+|JSONDecodeError",
        "vLLM refused the configuration",
        "the lines below name the field",
        weak=True,
    ),
    signature(
        "unknown",
        r"EngineCore encountered a fatal error|WorkerProc hit an exception|Error executing method",
        "a process of the server raised an exception",
        _ABOVE,
        weak=True,
    ),
    signature("unknown", r"core proc \S+ died unexpectedly", "the engine's process died", _ABOVE, weak=True),
    signature(
        TOLD_TO_STOP,
        r"\[shutdown\] API server: shutdown triggered|trigger received signal=SIGTERM",
        "somebody other than autotuner told the server to stop",
        LOOK,
        weak=True,
    ),
    # An honest "unknown": this line only says that another one, which is not here, holds the cause.
    signature(
        "unknown",
        r"Engine core initialization failed|EngineCore failed to start|WorkerProc initialization failed",
        "the engine did not start, and the cause is not in the lines kept",
        _ABOVE + "; if there is none, look for the OOM killer (dmesg)",
        weak=True,
    ),
)
