"""Host prefix cache: pages and states of finished prefills in host memory, found by their tokens."""
