"""The public reports: where each is told, what went wrong there, in short, and why some have no
case.

`S` are faults met while an arena-backed manager was built in the open; the others name the issue or
change that tells of them. The words are ours.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen


@frozen
class Report:
    """One public report."""

    source: str
    """`owner/repository#number`."""
    wrong: str
    why: str = ""
    """Why it has no case."""


ARENA: Final = "NVIDIA/TensorRT-LLM#16288, #19821, #20178"
"""Where the faults of the arena are told; which of them where is not known."""

REPORTS: Final = {
    "S01": Report(ARENA, "the offsets of a step are written over before they were read"),
    "S02": Report(ARENA, "freed memory sits behind a fence, and the pass that needs it gives up"),
    "S03": Report(ARENA, "an unmap while kernels read close by ends in a device fault"),
    "S04": Report(ARENA, "a suspend is half done when the host turns out to be full"),
    "S05": Report(ARENA, "a write-out overtakes the step whose bytes it takes"),
    "S06": Report(ARENA, "two requests of one batch say the same, and only one can be first"),
    "S07": Report(ARENA, "hits come from the host for ever although the GPU has the bytes"),
    "S08": Report(ARENA, "a question whether something can be had throws it away"),
    "S09": Report(ARENA, "a reclaim ends at its first success and waits once for each range"),
    "S10": Report(ARENA, "a burst gives up the shared prefixes just when memory is tight"),
    "S11": Report(ARENA, "memory mapped in advance takes the place of another request"),
    "S12": Report(ARENA, "the total was miscounted, one layout had more than the other"),
    "S13": Report(ARENA, "what was found at admission is gone when the request starts"),
    "S14": Report(ARENA, "each growth walks over all that is mapped already"),
    "S15": Report(ARENA, "room set aside is moved away before it is taken again"),
    "S16": Report(ARENA, "a page that is on the host for good is asked for on the GPU"),
    "S20": Report(ARENA, "after a fatal error the clean-up gives away what a copy still reads"),
    "S22": Report(ARENA, "a limit between two units cannot be asked for a second time"),
    "S23": Report(ARENA, "layers of different shapes are computed as if they were alike"),
    "S24": Report(ARENA, "a host tier that cannot be built is left out without a word"),
    "B01": Report("vllm-project/vllm#42571", "freed memory is queued twice and given to two"),
    "B02": Report("vllm-project/vllm#1584", "beams share pages, and these are released twice"),
    "B04": Report("sgl-project/sglang-jax#994", "two paths release the end of one request"),
    "B05": Report("LMCache/LMCache#993", "entries in use are evicted, then freed again"),
    "B07": Report("sgl-project/sglang#35501", "a slot with two users is free when one goes"),
    "B10": Report("vllm-project/vllm#47728", "a page leaves by the position that was scheduled"),
    "B11": Report("sgl-project/mini-sglang#89", "pages are free while the next batch runs on them"),
    "B13": Report("NVIDIA/TensorRT-LLM#18095", "eviction cuts blocks that a request builds on"),
    "B14": Report("NVIDIA/TensorRT-LLM#17926", "a commit evicts the chain that it extends"),
    "B16": Report("NVIDIA/TensorRT-LLM#16019", "a reused block remembers its earlier sequence"),
    "B17": Report("sgl-project/sglang#24527", "an aborted request frees what a copy still fills"),
    "B19": Report("vllm-project/vllm#32255", "abort and end of a load, in either order"),
    "B20": Report("vllm-project/vllm#52360", "a page is overwritten before it was copied away"),
    "B22": Report("LMCache/LMCache#4612", "a wait for the copies in flight does not wait"),
    "B23": Report("sgl-project/sglang#28468", "host room is given away while a backup fills it"),
    "B25": Report("sgl-project/sglang#35769", "a conflict frees what a copy is writing"),
    "B26": Report("NVIDIA/TensorRT-LLM#12542", "a block is evicted before it was sent"),
    "B28": Report("NVIDIA/TensorRT-LLM#10111", "pins are taken off other blocks than had them"),
    "B29": Report("vllm-project/vllm#21570", "what was promised is freed, and read all the same"),
    "B31": Report("kvcache-ai/Mooncake#3030", "a late end is taken for that of the next write"),
    "B32": Report(
        "sgl-project/sglang#9601", "the block before a copy's target is gone when it ends"
    ),
    "B34": Report("vllm-project/vllm#43226", "the end of a copy names a request that is gone"),
    "B35": Report("vllm-project/vllm#25067", "an abort frees what is kept for a reader"),
    "B37": Report("vllm-project/vllm#48102", "a request waits for copies that were forgotten"),
    "B38": Report("vllm-project/vllm#49889", "more blocks are stored than were computed"),
    "B40": Report("vllm-project/vllm#46283", "an end that nobody reports holds memory for ever"),
    "B41": Report("vllm-project/vllm#41269", "a rejected request leaves something behind"),
    "B43": Report("ai-dynamo/dynamo#3730", "a record is gone before the last end that needs it"),
    "B44": Report("LMCache/LMCache#3884", "what was looked up and used is never let go"),
    "B46": Report("LMCache/LMCache#3770", "a lock is released under a key without the salt"),
    "B47": Report("vllm-project/vllm#44101", "locks of a look-up outlive a request that never ran"),
    "B49": Report("LMCache/LMCache#1756", "storing counts one user too many"),
    "B50": Report(
        "sgl-project/sglang#16067", "a request that was not scheduled keeps what it took"
    ),
    "B52": Report("NVIDIA/TensorRT-LLM#15018", "late results of a removed request go astray"),
    "B53": Report("sgl-project/sglang#26972", "room for drafts is not freed with the rest"),
    "B55": Report("sgl-project/sglang#31616", "the end of a page that is not full is never freed"),
    "B58": Report("vllm-project/vllm#29387", "a block is found in the step that computes it"),
    "B59": Report("vllm-project/vllm#41838", "the same for full attention, seen in drafts"),
    "B61": Report("sgl-project/sglang#35270", "a block is found under tokens that it has no more"),
    "B62": Report("sgl-project/sglang#28374", "what an aborted request wrote is found later"),
    "B64": Report("vllm-project/vllm#4764", "an evicted block is still found"),
    "B65": Report("vllm-project/vllm#18957", "a hit of a failed attempt is used by the next"),
    "B67": Report("vllm-project/vllm-omni#6442", "the bytes are given up, the entries stay"),
    "B68": Report("vllm-project/vllm#57727", "a reset forgets one tier of two"),
    "B70": Report("NVIDIA/TensorRT-LLM#8830", "making room takes the very block that matched"),
    "B71": Report("vllm-project/vllm#44701", "an adapter's name and a salt look the same"),
    "B73": Report("vllm-project/vllm#12603", "an image before a block is not part of its name"),
    "B74": Report("LMCache/LMCache#4086", "two images have one short identity"),
    "B76": Report("sgl-project/sglang#31901", "numbers of host pages are used for other pages"),
    "B77": Report(
        "vllm-project/vllm#54733", "numbers of different kinds are taken for one another"
    ),
    "B79": Report("vllm-project/vllm#39702", "a hit is evicted before it is loaded"),
    "B80": Report("LMCache/LMCache#4133", "fewer tokens come than were promised"),
    "B82": Report("vllm-project/vllm#6849", "the same memory counts as free and as not needed"),
    "B83": Report("NVIDIA/TensorRT-LLM#15546", "one buffer serves a step and the one after it"),
    "B85": Report("vllm-project/vllm#26385", "a batch is kept as it was before a preemption"),
    "B88": Report("vllm-project/vllm#54296", "a position beyond the end is looked up all the same"),
    "B89": Report("tenstorrent/tt-metal#56324", "a row keeps entries of who had it before"),
    "B91": Report("sgl-project/sglang#36885", "the row that stands for nobody is somebody's"),
    "B107": Report("NVIDIA/TensorRT-LLM#12306", "suspending is relied on with nowhere to go"),
    "B109": Report("ggml-org/llama.cpp#25913", "what is saved of a sequence leaves a part out"),
    "B110": Report("ggml-org/llama.cpp#26695", "taking tokens back leaves a state as it was"),
    "B112": Report("vllm-project/vllm#16370", "drafts are written where nothing was allocated"),
    "B113": Report("lablup/mlxcel#994", "a rejected draft takes back a wrong number of tokens"),
    "B115": Report("vllm-project/vllm#49250", "who shares a failed load reads it all the same"),
    "B116": Report("xLLM-AI/xllm#1984", "shared pages are written, or outlive a reset as sources"),
    "B118": Report("NVIDIA/TensorRT-LLM#19444", "a copy that was queued lands on newer bytes"),
    "B119": Report("NVIDIA/TensorRT-LLM#15931", "host full in a suspend: a step sees half of it"),
    "B121": Report("ovg-project/kvcached#412", "some of a batch of maps fail and stay half done"),
    "B122": Report("ovg-project/kvcached#406", "a shrink is refused for what it would give back"),
    "B124": Report("vllm-project/vllm#34602", "what was mapped before memory ran out stays"),
    "B125": Report("vllm-project/vllm#45565", "an unmap failed and nobody was told"),
    "B127": Report("sgl-project/sglang#27108", "a backup that failed counts as there"),
    "B128": Report("ggml-org/llama.cpp#27068", "a failed restore leaves its data behind"),
    "B130": Report(
        "inference-sim/inference-sim#1061", "a failed growth takes what was there before"
    ),
    "B131": Report("ovg-project/kvcached#452", "blocks over the edge of a page are miscounted"),
    "B133": Report("ovg-project/kvcached#319", "memory kept in reserve only ever grows"),
    "B134": Report("sgl-project/sglang#32016", "the whole need is evicted, not what is missing"),
    "B136": Report("vllm-project/vllm#45388", "two half-loaded requests keep each other waiting"),
    "B137": Report("vllm-project/vllm#57104", "one block is missing, and nobody gives way"),
    "B139": Report(
        "vllm-project/vllm#49674", "victims are preempted, and their memory is not seen"
    ),
    "B140": Report("vllm-project/vllm#39734", "a request that can never fit is waited for"),
    "B143": Report("sgl-project/sglang#23537", "a leaf of the host is judged by the GPU"),
    "B145": Report("sgl-project/sglang#36350", "one request's release undoes another's lock"),
    "B146": Report("NVIDIA/TensorRT-LLM#3735", "a block is reused before the one behind it"),
    "B148": Report("vllm-project/vllm#47324", "a load and a step touch the same bytes, unordered"),
    "B149": Report("NVIDIA/TensorRT-LLM#9056", "a page is copied on before it has arrived"),
    "B151": Report("NVIDIA/TensorRT-LLM#16913", "a page is handed on before it is here"),
    "B152": Report("kekzl/imp#1709", "memory is overwritten that is still in use"),
    "B154": Report("ovg-project/kvcached#372", "a map that failed is reported as done"),
    "B155": Report("vllm-project/vllm#50754", "a transfer that failed never counts as ended"),
    "B157": Report("NVIDIA/TensorRT-LLM#5580", "events of two caches look the same"),
    "B158": Report("llm-d/llm-d-kv-cache#593", "who follows the events misses a reset or a parent"),
    "B161": Report("ovg-project/kvcached#465", "memory is remapped under running kernels"),
    "B166": Report("sgl-project/sglang#38941", "two frees meet inside one page"),
    "B167": Report("LMCache/LMCache#5248", "only the last of several copies is waited for"),
    "B171": Report("vllm-project/aibrix#2287", "a clear, or an end, is not told or not acted on"),
    "B172": Report("vllm-project/vllm#42892", "fields of events lose their places"),
    "B173": Report("sgl-project/sglang#8261", "an adapter has a name that events cannot carry"),
}

_WINDOW: Final = "windows of attention: their pages are dropped as a sequence goes on"
_GROUPS: Final = "several groups of layers with lengths of their own"
_TABLES: Final = "tables of pages on the device, and their padding"
_SPARSE: Final = "pages that leave one by one while their sequence runs"
_CARD: Final = (
    "only a card shows which device is current: `wrong device current` in `tests/faults/card.py`"
)
_SLEEP: Final = "giving all memory back while the weights stay, or the other way round"
LEFT: Final = {
    "S17": Report(ARENA, "who has lost no page is refused for it", _SPARSE),
    "S18": Report(ARENA, "a page leaves that another owner still reads", _SPARSE),
    "S19": Report(
        ARENA,
        "the host tier cannot be filled beyond some chunk",
        "a host tier that is filled while it is used",
    ),
    "S21": Report(ARENA, "a new thread works on the first device", _CARD),
    "B08": Report("sgl-project/sglang#31486", "what the window has left is published", _WINDOW),
    "B56": Report(
        "NVIDIA/TensorRT-LLM#19242",
        "two objects own each other",
        "a matter of one language's memory; what closing leaves is law 24",
    ),
    "B86": Report("vllm-project/vllm#34874", "a graph reads another group's buffers", _GROUPS),
    "B92": Report("sgl-project/sglang#36207", "padding is written where masked reads go", _TABLES),
    "B94": Report(
        "ModelEngine-Group/unified-cache-management#1053",
        "placeholders are freed, some twice",
        _TABLES,
    ),
    "B95": Report("sgl-project/sglang#29860", "the window leaves the last leaf", _WINDOW),
    "B97": Report("sgl-project/sglang#30845", "half a prompt forgets where the window is", _WINDOW),
    "B98": Report("sgl-project/sglang#27586", "a slot of the window is freed by another", _WINDOW),
    "B100": Report("NVIDIA/TensorRT-LLM#14478", "who commits late keeps what has left", _WINDOW),
    "B101": Report("sgl-project/sglang#17061", "a match goes on behind a hole", _WINDOW),
    "B103": Report("mybigday/llama.rn#396", "a prefix is used that the window has left", _WINDOW),
    "B104": Report("NVIDIA/TensorRT-LLM#10875", "each group says how much was found", _GROUPS),
    "B106": Report("vllm-project/vllm#47491", "one group's hits stand for another's", _GROUPS),
    "B142": Report(
        "ovg-project/kvcached#371",
        "pages on their way are in no list, and are waited for",
        "a matter of the lists of a second thread; here nothing is in no state",
    ),
    "B160": Report("pytorch/pytorch#196258", "an unmap waits for another device", _CARD),
    "B163": Report("vllm-project/vllm#44395", "a step runs while memory is asleep", _SLEEP),
    "B164": Report("fzyzcjy/torch_memory_saver#85", "memory keeps the mark of who had it", _SLEEP),
}
"""Reports without a case, and what a case would need."""
