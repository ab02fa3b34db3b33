"""How fast rows travel between a GPU and page-locked memory, by each method that copies them."""
