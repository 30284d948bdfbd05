"""What runs on the ranks of the tests of mha_ext.distributed."""
