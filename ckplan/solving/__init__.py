"""Find the cheapest plan that fits: menus for calls, a chain over them, a bound."""
