-- The role of workers and publishers. It owns nothing: `waypost migrate --grant shop` grants it what it needs.
CREATE ROLE shop LOGIN PASSWORD 'CHANGE-ME';
