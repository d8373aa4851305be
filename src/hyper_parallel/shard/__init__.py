"""HyperShard, the framework-free half: rules that map model parts to mesh axes, and the layouts they give."""
