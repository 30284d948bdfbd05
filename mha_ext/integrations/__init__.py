"""mha_ext inside other libraries, one module each; none is imported unless it is asked for."""
