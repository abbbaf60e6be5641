"""Which pipeline stage holds which layers: uneven stages, and interleaved ones with several chunks of layers each."""

from rl3d.layout.parallel import LayoutError


def stage_chunks(num_layers: int, pp: int, vpp: int = 1) -> tuple[tuple[range, ...], ...]:
    """Global layer indices of every chunk of every stage: ``[stage][chunk]``.

    The model is cut into ``pp * vpp`` virtual stages; chunk ``c`` of stage ``s`` is virtual stage ``c * pp + s``, the
    order of megatron-core's interleaved schedule (Narayanan et al. 2021, section 2.2). Where the layers do not divide,
    the first virtual stages hold one more, so the first ``num_layers % pp`` stages do: 30 layers over 4 stages are
    8, 8, 7 and 7.

    Raises:
        LayoutError: fewer layers than virtual stages, or chunks without stages to interleave.
    """
    if vpp > 1 and pp == 1:
        raise LayoutError(
            f"vpp = {vpp} interleaves the stages of a pipeline, but pp = 1; drop vpp or choose pp of 2 or more"
        )
    count = pp * vpp
    if num_layers < count:
        cut = f"pp = {pp} stages" if vpp == 1 else f"pp x vpp = {pp} x {vpp} = {count} virtual stages"
        raise LayoutError(f"{num_layers} layers do not fill {cut}; each needs one, so lower pp{' or vpp' * (vpp > 1)}")
    size, more = divmod(num_layers, count)
    starts = [index * size + min(index, more) for index in range(count + 1)]
    return tuple(
        tuple(range(starts[chunk * pp + stage], starts[chunk * pp + stage + 1]) for chunk in range(vpp))
        for stage in range(pp)
    )


def stage_layers(num_layers: int, pp: int, vpp: int = 1) -> tuple[tuple[int, ...], ...]:
    """Global layer indices that each stage holds, rising; see :func:`stage_chunks`, whose errors it raises."""
    return tuple(tuple(layer for chunk in chunks for layer in chunk) for chunks in stage_chunks(num_layers, pp, vpp))
